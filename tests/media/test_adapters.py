"""Adapters beside images: what a model with the adapter merged in answers, in one crowd."""

import json
import shutil

import pytest

pytest.importorskip("PIL")

from jaxllm import LLM
from jaxllm.errors import ValidationError
from jaxllm.lora.request import LoRARequest
from jaxllm.testing import make_tiny_adapter
from tests.media.answers import PARAMS, answers, assert_equal, taken
from tests.media.models import OPTIONS, make_qwen3_5
from tests.media.test_qwen import PROMPTS

SNAPSHOTS = {"mamba_block_size": 32, "num_state_snapshots": 16}


def merge(model, adapter, path):
    """Write the model with the adapter added to its weights."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, path)
    weights = load_file(model / "model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    given = load_file(adapter / "adapter_model.safetensors")
    for name, b in given.items():
        if ".lora_B." in name:
            added = b @ given[name.replace(".lora_B.", ".lora_A.")]
            layer = name.removeprefix("base_model.model.").replace(".lora_B.", ".")
            weights[layer] = weights[layer] + added * (config["lora_alpha"] / config["r"])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.sweep
def test_an_adapter_is_as_if_it_were_merged(tmp_path):
    model = make_qwen3_5(tmp_path / "model")
    names = ("q_proj", "out_proj", "down_proj")
    adapter = make_tiny_adapter(tmp_path / "adapter", model, target_modules=names)
    expected = []
    for path in (model, merge(model, adapter, tmp_path / "merged")):
        llm = LLM(path, **OPTIONS, **SNAPSHOTS)
        expected += answers(llm, PROMPTS)
        llm.shutdown()
    llm = LLM(model, **OPTIONS, **SNAPSHOTS, enable_lora=True)
    try:
        layers = llm.llm_engine.info.adapters.layers
        assert layers and not any("visual" in name for name in layers)
        request = LoRARequest("one", 1, str(adapter))
        for _ in range(2):  # the second time from snapshots
            outputs = llm.generate(
                [*PROMPTS, *PROMPTS],
                PARAMS,
                use_tqdm=False,
                lora_request=[None] * len(PROMPTS) + [request] * len(PROMPTS),
            )
            found = taken(outputs)
            assert_equal(found, expected)
        assert found[: len(PROMPTS)] != found[len(PROMPTS) :]
        other = make_tiny_adapter(tmp_path / "other", model, target_modules=["q_proj"])
        rename(other, "language_model.layers", "visual.blocks")
        with pytest.raises(ValidationError, match="visual"):
            llm.generate(PROMPTS[0], PARAMS, lora_request=LoRARequest("two", 2, str(other)))
    finally:
        llm.shutdown()


def rename(adapter, old, new):
    """Name layers of an adapter otherwise."""
    from safetensors.numpy import load_file, save_file

    file = adapter / "adapter_model.safetensors"
    save_file({name.replace(old, new): its for name, its in load_file(file).items()}, file)
