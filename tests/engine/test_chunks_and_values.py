"""Layers that see only the chunk of a context in which a token is, and heads with values of another
size than keys: a made-up family has both. Its tokens are those of its whole sequences, unpaged."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm import LLM, SamplingParams
from jaxllm.cache_groups import Chunk
from jaxllm.files import read_json
from jaxllm.models.architecture import read_architecture
from jaxllm.models.checkpoint_map import LLAMA_NAMES
from jaxllm.models.family import Family, pre_norm_layer, read_attention, read_decoder, read_mlp
from jaxllm.models.registry import ModelRegistry
from jaxllm.testing import make_tiny_checkpoint, tiny_weights
from jaxllm.training.forward import RowModel

CHUNK, BLOCK = 20, 8
PARAMS = SamplingParams(temperature=0, max_tokens=50, logprobs=1, ignore_eos=True)
OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 512,
    "kv_cache_request_len": 64,
    "check_invariants": True,
    "enforce_eager": True,
}


def read(name, config):
    """Llama, with chunks in all layers but the last, which does not rotate."""
    attention = dataclasses.replace(
        read_attention(config, default_head_size=16), v_head_size=config.integer("v_head_dim")
    )
    chunked = dataclasses.replace(attention, chunk=config.integer("attention_chunk_size"))
    kinds = [chunked] * (config.integer("num_hidden_layers") - 1)
    kinds.append(dataclasses.replace(attention, rope=None))
    mlp = read_mlp(config)
    return read_decoder(name, config, [pre_norm_layer(config, kind, mlp) for kind in kinds])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    family = Family(read=read, checkpoint=lambda architecture: LLAMA_NAMES, tiny={})
    with pytest.MonkeyPatch.context() as patch:
        for table in ("_classes", "_families"):
            patch.setattr(ModelRegistry, table, dict(getattr(ModelRegistry, table)))
        ModelRegistry.register_model("Chunked", family=family)
        path = make_tiny_checkpoint(tmp_path_factory.mktemp("model"))
        config = read_json(path / "config.json") | {
            "architectures": ["Chunked"],
            "num_hidden_layers": 3,
            "v_head_dim": 32,
            "attention_chunk_size": CHUNK,
        }
        (path / "config.json").write_text(json.dumps(config))
        save_file(tiny_weights(config, 0), path / "model.safetensors", metadata={"format": "pt"})
        yield path


def prompt(index, length):
    return [3 + (index * 131 + i * i * 7 + i) % 380 for i in range(length)]


PROMPTS = [{"prompt_token_ids": prompt(i, length)} for i, length in enumerate([100, 5, 40, 90])]


@pytest.fixture(scope="module")
def base(model):
    return LLM(str(model), **OPTIONS)


@pytest.fixture(scope="module")
def expected(base):
    return base.generate(PROMPTS, PARAMS, use_tqdm=False)


def test_tokens_are_those_of_whole_sequences(model, expected):
    whole = RowModel(read_architecture(read_json(model / "config.json")))
    weights = whole.load(model)
    for request, answer in zip(PROMPTS, expected, strict=True):
        (completion,) = answer.outputs
        ids = request["prompt_token_ids"] + list(completion.token_ids)
        (logits,) = np.asarray(whole.logits(weights, jnp.array([ids])))
        logits = logits[-1 - len(completion.token_ids) : -1].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        steps = zip(completion.token_ids, completion.logprobs, strict=True)
        given = [by_token[token].logprob for token, by_token in steps]
        assert list(completion.token_ids) == logprobs.argmax(-1).tolist()
        np.testing.assert_allclose(given, logprobs.max(-1), atol=1e-4)


def test_chunks_are_a_group_that_gives_blocks_back(base, expected, assert_same):
    everything, chunks = base.llm_engine.info.cache_groups
    assert (everything.window, chunks.window) == (None, Chunk(CHUNK))
    assert chunks.num_blocks < everything.num_blocks
    again = base.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [out.num_cached_tokens for out in again] == [96, 0, 32, 88]
    assert_same(again, expected)


def test_other_ways_of_other_kernels_lead_to_the_same(model, expected, assert_same):
    few = {"num_gpu_blocks_override": 34, "enable_prefix_caching": False}
    others = {"attention_backend": "xla", "long_prefill_token_threshold": 7}
    llm = LLM(str(model), **OPTIONS | few | others)
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)
    assert llm.llm_engine.stats().num_preemptions > 0
