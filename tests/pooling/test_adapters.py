"""Adapters in an engine that pools: each prompt has the vector that the merged model gives it."""

import shutil
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, LoRARequest, ValidationError
from tests.pooling.models import (
    TEXTS,
    describe,
    hidden_states,
    unit,
    write_adapter,
    write_model,
)
from tests.profile import TINY

pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

QUIET: dict[str, Any] = {"use_tqdm": False}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
SCALE = 2.0
LONG = " ".join(TEXTS)


def merged(path, model, adapter, *, prefix=""):
    """Write the checkpoint of W + s B A."""
    shutil.copytree(model, path)
    weights = load_file(model / "model.safetensors")
    its = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in its if name.endswith("lora_A.weight")]:
        layer = name.removeprefix(f"base_model.model.{prefix}").removesuffix(".lora_A.weight")
        weights[f"{layer}.weight"] += SCALE * its[name.replace("lora_A", "lora_B")] @ its[name]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


# By kind: what adapters change, and what is before the names of layers.
KINDS = {
    "Qwen3Model": ("qwen3", ("q_proj", "v_proj", "down_proj"), ""),
    "a causal model's names": ("qwen3", ("q_proj", "v_proj", "down_proj"), "model."),
    "BertModel": ("bert", ("query", "value", "output.dense"), ""),
}


@pytest.mark.parametrize(
    "kind",
    ["Qwen3Model", "BertModel", pytest.param("a causal model's names", marks=pytest.mark.sweep)],
)
def test_each_prompt_has_the_vector_of_the_merged_model(tmp_path, kind):
    family, last_names, prefix = KINDS[kind]
    path = write_model(tmp_path / "model", kind if kind[0].isupper() else "Qwen3Model", family)
    describe(path, "pooling_mode_mean_tokens")
    adapters = [
        write_adapter(tmp_path / str(seed), path, last_names, prefix=prefix, seed=seed)
        for seed in (1, 2)
    ]
    sizes = TINY | {"max_num_batched_tokens": 128 if family == "bert" else 32}
    llm = LLM(path, **sizes, **LORA, check_invariants=True)
    loras = [LoRARequest(str(number), number, str(its)) for number, its in enumerate(adapters, 1)]
    texts = [TEXTS[0], LONG, TEXTS[2], TEXTS[4], TEXTS[1]]
    mix = [loras[0], loras[1], None, loras[0], loras[1]]
    outputs = llm.embed(texts, lora_request=mix, **QUIET)
    for output, lora in zip(outputs, mix, strict=True):
        its = path
        if lora is not None and not (its := tmp_path / f"merged{lora.lora_name}").exists():
            merged(its, path, adapters[lora.lora_int_id - 1], prefix=prefix)
        (hidden,) = hidden_states(its, [output.prompt_token_ids])
        np.testing.assert_allclose(output.outputs.embedding, unit(hidden.mean(0)), atol=1e-5)
    scores = llm.score(TEXTS[0], TEXTS[1:3], lora_request=loras[0], **QUIET)
    vectors = llm.embed(TEXTS[:3], lora_request=loras[0], **QUIET)
    want = [np.dot(vectors[0].outputs.embedding, one.outputs.embedding) for one in vectors[1:]]
    np.testing.assert_allclose([one.outputs.score for one in scores], want, atol=1e-6)


def test_prefixes_of_another_adapter_are_not_found_and_heads_take_none(tmp_path):
    path = write_model(tmp_path / "model", "LlamaForSequenceClassification", "llama", num_labels=3)
    adapter = write_adapter(tmp_path / "one", path, ("q_proj", "down_proj"))
    llm = LLM(path, **TINY, **LORA)
    lora = LoRARequest("one", 1, str(adapter))
    plain = llm.classify(LONG, **QUIET)[0]
    first, second = (llm.classify(LONG, lora_request=lora, **QUIET)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 and second.num_cached_tokens > 0
    np.testing.assert_allclose(first.outputs.probs, second.outputs.probs, atol=1e-5)
    assert np.abs(np.subtract(first.outputs.probs, plain.outputs.probs)).max() > 1e-3
    with pytest.raises(ValidationError, match="score: the model has no such linear layer"):
        wrong = write_adapter(tmp_path / "head", path, ("score",))
        llm.classify(LONG, lora_request=LoRARequest("head", 2, str(wrong)), **QUIET)
