"""Prompts with images for Gemma 3, in which the tokens of an image see each other."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("PIL")

from PIL import Image

from jaxllm import LLM
from jaxllm.errors import ValidationError
from jaxllm.files import read_json
from jaxllm.media.host import Images
from jaxllm.media.item import ImageItem
from tests.media.answers import (
    PARAMS,
    answers,
    assert_as_logits,
    assert_equal,
    before_marks,
    each_alone,
    taken,
)
from tests.media.models import OPTIONS, make_gemma3, picture

SOFT = 3
MARK = "<start_of_image>"
STEPS = OPTIONS | {"max_num_batched_tokens": 32}
PICTURES = [picture(64, 64), picture(3, 2, 1), picture(15, 120, 2), picture(32, 32, 3)]


def prompt(*images, text=f"Look: {MARK} What is it?") -> Any:
    if len(images) > 1:
        text = f"One {MARK} and\n" * len(images) + " what else?"
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


PROMPTS = [
    prompt(PICTURES[0]), prompt(PICTURES[2], PICTURES[0]), prompt(PICTURES[3], text=MARK),
    prompt(*PICTURES),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_gemma3(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def llm(model):
    llm = LLM(model, **STEPS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def alone(llm):
    return each_alone(llm, PROMPTS)


@pytest.mark.oracle
def test_answers_are_those_of_transformers(model, llm):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    oracle = AutoModelForImageTextToText.from_pretrained(model, dtype="float32").eval()
    processor = Gemma3ImageProcessorPil(**read_json(model / "preprocessor_config.json"))
    outputs = llm.generate(PROMPTS, PARAMS.clone(prompt_logprobs=0), use_tqdm=False)
    for one, output in zip(PROMPTS, outputs, strict=True):
        images = [Image.fromarray(image) for image in one["multi_modal_data"]["image"]]
        pixels = processor(images, return_tensors="pt")["pixel_values"]
        tokens = before_marks(output, {SOFT})
        ids = torch.tensor([output.prompt_token_ids + tokens])
        with torch.no_grad():
            is_image = (ids == SOFT).long()
            logits = oracle(ids, pixel_values=pixels, token_type_ids=is_image).logits[0]
        assert_as_logits(output, tokens, logits)


def test_alone_is_as_in_a_crowd(llm, alone):
    assert llm.reset_prefix_cache()
    text = {"prompt": "A prompt of text alone, between those with images."}
    crowd = answers(llm, [*PROMPTS, text, *PROMPTS])
    assert_equal(crowd, [*alone, crowd[len(PROMPTS)], *alone])


def test_cached_is_as_cold(llm, alone):
    """The cached prefix ends inside an image."""
    assert llm.reset_prefix_cache()
    answers(llm, [PROMPTS[3]])
    (output,) = llm.generate(PROMPTS[3], PARAMS, use_tqdm=False)
    ids, cached = output.prompt_token_ids, output.num_cached_tokens
    assert cached > 64 and SOFT == ids[cached - 1] == ids[cached]
    assert_equal(taken([output]), alone[3:])


def test_steps_of_other_sizes_answer_the_same(model, alone):
    """Also where the whole prompt is in one, and by the plain reference."""
    llm = LLM(model, **STEPS | {"max_num_batched_tokens": 128, "attention_backend": "reference"})
    assert_equal(answers(llm, PROMPTS), alone)
    llm.shutdown()


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["xla", "native"])
def test_backends_answer_the_same(model, alone, backend):
    llm = LLM(model, **STEPS | {"attention_backend": backend, "num_gpu_blocks_override": 40})
    assert_equal(answers(llm, PROMPTS * 2), alone * 2)
    llm.shutdown()


def test_a_mark_in_a_text_becomes_what_the_processor_writes(llm):
    text = f"user\n{MARK}What?"
    (output,) = llm.generate([prompt(PICTURES[0], text=text)], PARAMS, use_tqdm=False)
    written = text.replace(MARK, f"\n\n{MARK}{'<image_soft_token>' * 16}<end_of_image>\n\n")
    assert output.prompt_token_ids == llm.get_tokenizer().encode(written)
    # So do the ids of a chat, of which the text is given, too.
    its_ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    both = prompt(PICTURES[0], text=text) | {"prompt_token_ids": its_ids}
    assert llm.generate([both], PARAMS, use_tqdm=False)[0].prompt_token_ids == (
        output.prompt_token_ids
    )
    # Of ids, the token of the embeddings stands once for each image.
    ids = llm.get_tokenizer().encode(text.replace(MARK, "<image_soft_token>"))
    given = {"prompt_token_ids": ids, "multi_modal_data": {"image": PICTURES[0]}}
    (output,) = llm.generate([given], PARAMS, use_tqdm=False)
    assert output.prompt_token_ids.count(SOFT) == 16
    with pytest.raises(ValidationError, match="2 times"):
        llm.generate([prompt(PICTURES[0], text=text + MARK)], PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_batched_tokens": 19}, "max_num_batched_tokens.*at least 20"),
        ({"long_prefill_token_threshold": 8}, "long_prefill_token_threshold"),
        ({"mm_processor_kwargs": {"size": {"longest_edge": 8}}}, "nothing may be changed"),
        ({"attention_backend": "tpu"}, "attention_backend"),
    ],
)
def test_refusals_name_the_option(model, options, says):
    with pytest.raises(ValidationError, match=says):
        LLM(model, **STEPS | options)


def test_text_needs_no_tower(model, llm):
    """And no step that holds an image."""
    its = LLM(model, **STEPS | {"max_num_batched_tokens": 8, "language_model_only": True})
    text = [{"prompt": "A prompt of text alone."}]
    assert_equal(answers(its, text), answers(llm, text))
    with pytest.raises(ValidationError, match="reads text alone"):
        answers(its, PROMPTS[:1])
    its.shutdown()


@pytest.mark.parametrize("before", ["", "model."])
def test_checkpoints_have_their_tower_where_any_version_writes_it(model, tmp_path, alone, before):
    from safetensors.numpy import load_file, save_file

    def renamed(name):
        name = name.replace("vision_tower.vision_model", "vision_tower")
        if before:
            name = name.replace("language_model.model", "language_model")
        return before + name

    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = {renamed(its): array for its, array in load_file(model / "model.safetensors").items()}
    weights[f"{before}vision_tower.head.probe"] = weights[
        f"{before}vision_tower.post_layernorm.bias"
    ]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(tmp_path, **STEPS)
    assert_equal(answers(llm, PROMPTS[:1]), alone[:1])
    llm.shutdown()


def test_images_of_a_step_are_counted_wherever_its_chunks_end(model):
    """Those before an image that is left out, and those in which a cached prefix ends."""
    spec = LLM(model, **STEPS).llm_engine.info.images
    images = Images(spec, num_rows=32)  # two of them

    def request(name, *starts):
        items = [
            ImageItem(
                digest=f"{name}{at}".encode(), start=at, end=at + 16, rows=8, columns=8, pixels=b""
            )
            for at in starts
        ]
        tokens = [7] * 60
        for item in items:
            tokens[item.start : item.end] = [SOFT] * 16
        its = SimpleNamespace(
            request_id=name, images=items, prompt_token_ids=tokens, num_tokens=len(tokens)
        )
        images.add(its)
        return its

    first, second, third = request("a", 4, 30), request("b", 4), request("c", 4)
    images.ready(wait=False)
    assert images.limit(first, 60, 40) == 30  # up to its second image, behind the first
    assert images.limit(second, 50, 50) == 50  # from inside of its image on
    assert images.limit(third, 50, 50) == 0  # there is no room for a third
    images.ready(wait=False)
    assert images.limit(third, 50, 9) == 0  # and none is cut
    assert images.limit(third, 50, 10) == 50


def test_no_prompt_with_images_is_computed_token_by_token(model):
    llm = LLM(model, **STEPS | {"max_logprobs": -1})
    many = PARAMS.clone(prompt_logprobs=21)
    with pytest.raises(ValidationError, match="prompt_logprobs=21.*at most 20"):
        llm.generate(PROMPTS[:1], many, use_tqdm=False)
    llm.generate("a", many, use_tqdm=False)
    llm.shutdown()
