"""Any options of an engine that pools: it refuses them by name, or its vectors are those of a plain
one, beside whichever other texts they are computed.

Those of several devices are among them if there are such, as with JAX_NUM_CPU_DEVICES=4.
"""

import math
import random

import jax
import numpy as np
import pytest

from jaxllm import LLM, LoRARequest, PoolingParams, ValidationError
from jaxllm.errors import UnsupportedModelError
from jaxllm.models.registry import family_names
from jaxllm.testing import make_tiny_adapter, make_tiny_checkpoint
from tests.draws import ENCODERS, HOW, MESHES, WHAT, draw
from tests.pooling.models import write_model
from tests.profile import TINY

pytest.importorskip("torch")

ENGINES = 60
NUM_TEXTS = 9
# Some families whose layers have the names that adapters of tests change.
ADAPTED = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "olmo2", "phi3")
# Options that say what is computed: of prompts a vector, of a part of its numbers, or scores.
POOLED = (
    {"pooler_config": {"pooling_type": "LAST"}},
    {"pooler_config": {"pooling_type": "MEAN"}},
    {"pooler_config": {"pooling_type": "CLS"}},
    {"pooler_config": {"pooling_type": "MEAN", "use_activation": False}},
    {"hf_overrides": {"is_matryoshka": True}},
    {"hf_overrides": {"is_causal": False}},
    {"pooler_config": {"pooling_type": "STEP", "step_tag_id": 50, "returned_token_ids": [7, 9]}},
)


def draw_engine(rng, path):
    """An engine, its model and the options that a plain one has, too."""
    while True:
        family = rng.choice([*sorted({*family_names()} - {*ENCODERS}), *("bert",) * 6])
        folder = path / str(rng.random())
        name = folder / "model"
        if family == "bert":
            write_model(name, "BertModel", family)
        else:
            make_tiny_checkpoint(name, family)
        plain = TINY | {"runner": "pooling"} | draw(rng, WHAT) | rng.choice(POOLED)
        how = draw(rng, HOW) | rng.choice(
            [mesh for mesh in MESHES if math.prod(mesh.values()) <= jax.device_count()]
        )
        how |= {"check_invariants": True}
        how["num_gpu_blocks_override"] = 128 // how["block_size"] * 2 + rng.randint(1, 3)
        sees_all = "is_causal" in plain.get("hf_overrides", ())
        if family == "bert" or sees_all:
            plain |= {"max_num_batched_tokens": 128, "kv_cache_dtype": "auto"}
            how["max_num_batched_tokens"] = rng.choice((128, 256))
            how["enable_prefix_caching"] = False
        adapters = []
        if family in ADAPTED and rng.random() < 0.6:
            plain |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
            for i in (1, 2):
                adapter = make_tiny_adapter(folder / f"adapter-{i}", name, seed=i, rank=4 + i)
                adapters.append(LoRARequest(f"adapter-{i}", i, adapter))
        else:
            del how["max_loras"]
        try:
            return LLM(name, **plain | how), name, plain, adapters
        except (ValidationError, UnsupportedModelError) as error:
            given = plain | how
            drawn = [name for name, value in given.items() if TINY.get(name) != value]
            named = [*drawn, *plain.get("hf_overrides", ())]
            assert any(option in str(error) for option in named), error


def draw_text(rng, llm, adapters):
    """A prompt, what is wanted of it, and an adapter or none."""
    ids = rng.choices(range(3, 380), k=rng.choice([1, 2, 5, 16, 17, 33, 60, 127]))
    if rng.random() < 0.4:
        ids = list(range(50, 50 + rng.choice([16, 32, 40]))) + ids[:50]
    pooling = llm.llm_engine.info.pooling
    fields = {"task": rng.choice(pooling.tasks), "use_activation": rng.choice((None, True, False))}
    if pooling.may_be_cut and "embed" in fields["task"]:
        fields["dimensions"] = rng.choice((None, 1, 7, 16))
    return ids, PoolingParams(**fields), rng.choice([None, *adapters])


def vectors(llm, texts):
    prompts, params, loras = zip(*texts, strict=True)
    lora_request = loras if any(loras) else None
    outputs = llm.encode([*prompts], [*params], lora_request=lora_request, use_tqdm=False)
    return [np.asarray(output.outputs.data) for output in outputs]


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(ENGINES))
def test_options_are_refused_by_name_or_change_no_vector(seed, tmp_path):
    rng = random.Random(seed)
    llm, name, plain, adapters = draw_engine(rng, tmp_path)
    texts = [draw_text(rng, llm, adapters) for _ in range(NUM_TEXTS)]
    first = vectors(llm, texts)
    if rng.random() < 0.3:
        llm.sleep(level=1)
        llm.wake_up()
    order = rng.sample(range(NUM_TEXTS), NUM_TEXTS)
    again = vectors(llm, [texts[i] for i in order])
    alone = LLM(name, **plain)
    expected = [vectors(alone, [text])[0] for text in texts]
    # A number that is rounded to 8 bits may go the other way.
    rounds = plain["kv_cache_dtype"] != "auto" or plain["quantization"]
    atol = 2e-2 if rounds else 1e-4
    for i, want in enumerate(expected):
        scale = max(1, np.abs(want).max(initial=0))
        np.testing.assert_allclose(first[i] / scale, want / scale, atol=atol, err_msg=f"{i}")
        np.testing.assert_allclose(again[order.index(i)] / scale, want / scale, atol=atol)
