"""Prompts with images beside transformers, in one run: the first token of a prompt with an image,
and eight questions about one image.

    python benchmarks/images.py [--rounds 3] [--dtype bfloat16] [--pixels 448] [--out FILE]

The model is a Qwen3-VL of 0.3 billion random parameters, with a tower of 0.09. Both engines are in
this process and take turns, so that other load on the machine affects both alike. Both begin with
pixels of Pillow, and no image comes twice but within the eight. transformers answers the eight as
one batch. jaxllm answers what it has in its cache of prefixes from there, so that the image is
encoded once; how often is in the record. Both generate the same number of tokens.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import side_by_side
from PIL import Image
from safetensors.numpy import save_file

from jaxllm import LLM, SamplingParams
from jaxllm.files import read_json
from jaxllm.testing import make_tiny_checkpoint, tiny_weights

IMAGE, BEGIN, END = 3, 4, 5
TEXT: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_heads": 12,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [3, 6, 9],
    "out_hidden_size": 1024,
}
NUM_TOKENS = 32  # of each of the eight answers
LENGTH = 40  # of a question


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pixels", type=int, default=448, help="the edge of an image")
    side_by_side.add_out_argument(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), args.dtype)
        rows = measure(model, args)
    for row in rows:
        print(json.dumps(row), flush=True)
    side_by_side.record("images", rows, args)


def write_model(path: Path, dtype: str) -> Path:
    of_tiny_heads = TEXT["rope_parameters"] | {"mrope_section": [6, 5, 5]}
    make_tiny_checkpoint(
        path,
        "qwen3",
        sees_images=True,
        model_type="qwen3_vl_text",
        rope_theta=1e4,
        rope_parameters=of_tiny_heads,
    )
    config = read_json(path / "config.json") | {"dtype": dtype}
    config["text_config"] |= TEXT | {"dtype": dtype}
    config["vision_config"] |= VISION
    (path / "config.json").write_text(json.dumps(config))
    save_file(tiny_weights(config, 0), path / "model.safetensors", metadata={"format": "pt"})
    processor = read_json(path / "preprocessor_config.json")
    processor |= {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def measure(model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    engines = {"jaxllm": jaxllm(model, args), "transformers": transformers(model, args)}
    cases = {"first token of one image": (1, 1), "eight questions about one image": (8, NUM_TOKENS)}
    rows = []
    for what, (count, num_tokens) in cases.items():
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        encoded = 0
        for turn in range(args.rounds + 1):
            pixels = rng.integers(0, 256, (args.pixels, args.pixels, 3), np.uint8)
            questions = rng.integers(6, 32_000, (count, LENGTH)).tolist()
            for name, answer in engines.items():
                start = time.perf_counter()
                encoded = answer(Image.fromarray(pixels), questions, num_tokens) or encoded
                if turn:  # the first one warms up
                    seconds[name].append(time.perf_counter() - start)
        medians = {f"{name}_s": round(statistics.median(its), 3) for name, its in seconds.items()}
        ratio = medians["transformers_s"] / medians["jaxllm_s"]
        rows.append(
            {"what": what, **medians, "transformers_over_jaxllm": round(ratio, 2)}
            | {"images_encoded": encoded}
        )
    return rows


Answer = Callable[[Image.Image, list[list[int]], int], int | None]


def jaxllm(model: Path, args: argparse.Namespace) -> Answer:
    llm = LLM(
        model,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=1024,
    )

    def answer(image: Image.Image, questions: list[list[int]], num_tokens: int) -> int:
        before = llm.llm_engine.stats().num_images_encoded
        prompts = [
            {
                "prompt_token_ids": [BEGIN, IMAGE, END, *question],
                "multi_modal_data": {"image": image},
            }
            for question in questions
        ]
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert {len(output.outputs[0].token_ids) for output in outputs} == {num_tokens}
        return llm.llm_engine.stats().num_images_encoded - before

    return answer


def transformers(model: Path, args: argparse.Namespace) -> Answer:
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.set_num_threads(os.cpu_count() or 1)
    dtype = getattr(torch, args.dtype)
    oracle = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).eval()
    oracle.generation_config.eos_token_id = None
    fields = read_json(model / "preprocessor_config.json")
    del fields["image_processor_type"]
    processor = Qwen2VLImageProcessorPil(**fields)

    def answer(image: Image.Image, questions: list[list[int]], num_tokens: int) -> None:
        made = processor([image] * len(questions), return_tensors="pt")
        num_soft = int(made["image_grid_thw"][0].prod()) // 4
        ids = torch.tensor([[BEGIN, *[IMAGE] * num_soft, END, *its] for its in questions])
        with torch.inference_mode():
            out = oracle.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pixel_values=made["pixel_values"].to(dtype),
                image_grid_thw=made["image_grid_thw"],
                mm_token_type_ids=(ids == IMAGE).long(),
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        assert out.shape[1] == ids.shape[1] + num_tokens

    return answer


if __name__ == "__main__":
    main()
