"""The head in a checkpoint whose decoder has recurrent layers: it drafts, and tokens stay the same.

One model's delta net adds little to its stream, and its head has the weights of its layer with
attention and goes by the tokens alone. So nearly every draft is right, as long as the head has read
what came before: chunks, cached prefixes and what preempted requests have lost. The first token of
every prompt has no embedding, since no head reads it.
"""

import string

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, SamplingParams, StructuredOutputsParams
from jaxllm.runner.stage import Stage
from jaxllm.speculation.drafter import NO_DRAFT
from jaxllm.testing import make_tiny_checkpoint
from tests.heads import add_mtp
from tests.hybrids import HybridFormulas

K = 3
BASE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "num_gpu_blocks_override": 24,
    "mamba_block_size": 16,
    "num_state_snapshots": 24,
    "check_invariants": True,
    "enforce_eager": True,
}
MTP = {
    "method": "mtp",
    "num_speculative_tokens": K,
    "num_speculative_tokens_per_batch_size": [[1, 4, K]],
}
# A delta net and a layer with attention.
SHAPE = {"num_hidden_layers": 2, "full_attention_interval": 2, "layer_types": None}
SILENT = 2
PROMPTS = [
    [SILENT, *(3 + (i * 131 + j * j * 7 + j) % 380 for j in range(length - 1))]
    for i, length in enumerate([40, 9, 17, 26, 33])
]
PARAMS = [
    SamplingParams(temperature=i % 2, seed=i, max_tokens=40 + 3 * i, logprobs=1, ignore_eos=True)
    for i in range(len(PROMPTS))
]
# Tiles and single tokens add the same numbers up in another order.
ATOL = 1e-4


# In checkpoints of a family: the weights that make the recurrent layer silent, the head's own, and
# where the others are in the decoder.
SILENCE = {
    "qwen3_5": {
        "model.layers.0.linear_attn.out_proj.weight": 0.01,
        "model.layers.0.mlp.down_proj.weight": 0,
    },
    "nemotron_h": {"backbone.layers.0.mixer.out_proj.weight": 0.01},
}


def with_its_own_head(path, family, **config):
    """A model, and its head with the same weights."""
    model = make_tiny_checkpoint(path, family, **config)
    file = model / "model.safetensors"
    tensors = load_file(file)
    decoder = "model" if family == "qwen3_5" else "backbone"
    embed = tensors[f"{decoder}.embed{'_tokens' if family == 'qwen3_5' else 'dings'}.weight"]
    # So that the norm of embeddings changes nothing.
    embed /= np.sqrt(np.mean(np.square(embed), axis=1, keepdims=True))
    embed[SILENT] = 0
    for name, factor in SILENCE[family].items():
        tensors[name] *= factor
    save_file(tensors, file, metadata={"format": "pt"})
    first, size = np.eye(embed.shape[1], 2 * embed.shape[1], dtype=np.float32), embed.shape[1]
    if family == "qwen3_5":
        own = {"mtp.fc": first, "mtp.pre_fc_norm_embedding": np.zeros(size, np.float32)}
        own["mtp.norm"] = tensors["model.norm.weight"]
        layers = {"model.layers.1.": "mtp.layers.0."}
    else:
        own = {"mtp.layers.0.eh_proj": first, "mtp.layers.0.enorm": np.ones(size, np.float32)}
        own["mtp.layers.1.final_layernorm"] = tensors["backbone.norm_f.weight"]
        layers = {f"backbone.layers.{index + 1}.": f"mtp.layers.{index}." for index in (0, 1)}
    its = add_mtp(model) | {f"{name}.weight": value for name, value in own.items()}
    for at, of_head in layers.items():
        its |= {of_head + n.removeprefix(at): v for n, v in tensors.items() if n.startswith(at)}
    assert its.keys() == load_file(file).keys() - tensors.keys()
    save_file(tensors | its, file, metadata={"format": "pt"})
    return str(model)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return with_its_own_head(tmp_path_factory.mktemp("model"), "qwen3_5", **SHAPE)


@pytest.fixture(scope="module")
def expected(model):
    return LLM(model, **BASE).generate(PROMPTS, PARAMS, use_tqdm=False)


def counted(llm, run):
    """What a run returns, and the drafts, those accepted, and the preemptions that it has."""
    names = ("num_draft_tokens", "num_accepted_tokens", "num_preemptions")
    before = [getattr(llm.llm_engine.stats(), name) for name in names]
    result, stats = run(), llm.llm_engine.stats()
    return result, *(getattr(stats, name) - n for name, n in zip(names, before, strict=True))


def test_a_head_drafts_what_is_right_and_changes_no_token(model, expected, assert_same):
    llm = LLM(model, **BASE, speculative_config=MTP)
    outputs, drafted, accepted, preempted = counted(
        llm, lambda: llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    )
    assert_same(outputs, expected, ATOL)
    assert preempted > 0
    assert 0.9 * drafted < accepted < drafted
    # From a snapshot, with the head's own keys of the prefix.
    for num_cached in (None, 32):
        again, drafted, accepted, _ = counted(
            llm, lambda: llm.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
        )
        assert_same(again, expected[:1], ATOL)
        assert again[0].num_cached_tokens == num_cached or num_cached is None
        assert 0.9 * drafted < accepted and drafted > 20


@pytest.mark.parametrize(
    "options",
    [
        # Parts end where snapshots are, so that some have a single token.
        {"long_prefill_token_threshold": 5},
        pytest.param({"async_scheduling": False}, marks=pytest.mark.sweep),
        pytest.param({"enforce_eager": False}, marks=pytest.mark.sweep),
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.sweep),
    ],
)
def test_neither_do_other_schedules(model, options, expected, assert_same):
    llm = LLM(model, **BASE | options, speculative_config=MTP)
    outputs, drafted, accepted, _ = counted(
        llm, lambda: llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    )
    assert_same(outputs, expected, ATOL)
    assert 0.9 * drafted < accepted
    if not options.get("enforce_eager", True):
        assert llm.llm_engine.stats().num_compiles_after_warmup == 0


@pytest.mark.sweep
def test_attention_and_experts_of_nemotron_draft_what_is_right(tmp_path, assert_same):
    config = {"hybrid_override_pattern": "M*E", "num_nextn_predict_layers": 1}
    model = with_its_own_head(tmp_path, "nemotron_h", **config)
    expected = LLM(model, **BASE).generate(PROMPTS, PARAMS, use_tqdm=False)
    llm = LLM(model, **BASE, speculative_config=MTP)
    outputs, drafted, accepted, _ = counted(
        llm, lambda: llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    )
    assert_same(outputs, expected, ATOL)
    assert 0.9 * drafted < accepted < drafted


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_drafts_are_those_of_the_formulas(family, tmp_path, monkeypatch):
    """Of a random head, after a prompt in chunks, and again after the cached prefix. The drafts are
    read where they lie."""
    model = make_tiny_checkpoint(tmp_path, family, **SHAPE, mlp_only_layers=[])
    add_mtp(model)
    seen, run = [(0, [])], Stage.run

    def run_and_look(stage, packed, *arrived):
        left = run(stage, packed, *arrived)
        seen.append((int(stage._state.lengths[0]), stage._state.drafts[0].tolist()))
        return left

    monkeypatch.setattr(Stage, "run", run_and_look)
    llm = LLM(str(model), **BASE, speculative_config=MTP, async_scheduling=False)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    formulas = HybridFormulas(model)
    for num_cached in (0, 32):
        seen[:] = [(0, seen[-1][1])]
        [output] = llm.generate(PROMPTS[:1], params, use_tqdm=False)
        assert output.num_cached_tokens == num_cached
        text, compared = PROMPTS[0] + output.outputs[0].token_ids, 0
        for (length, old), (_, drafts) in zip(seen, seen[1:], strict=False):
            made = [draft for draft in drafts if draft != NO_DRAFT]
            if drafts != old and any(made):
                assert made == formulas.drafts(text[: length + 1], K)[: len(made)]
                compared += len(made)
        assert compared > 3 * K


def test_it_drafts_in_a_form(model):
    """The head reads what the second program has found to be right, and so do the states."""
    form = StructuredOutputsParams(regex="[a-z ]{50,90}")
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=45, structured_outputs=form)
        for i in range(len(PROMPTS))
    ]
    plain = LLM(model, **BASE)
    # So many of the model's tokens are in the form that some drafts are.
    tokenizer = plain.get_tokenizer()
    letters = [t for t in range(380) if set(tokenizer.decode([t])) <= set(string.ascii_lowercase)]
    params = [one.clone(allowed_token_ids=letters[1:], ignore_eos=True) for one in params]
    expected = plain.generate(PROMPTS, params, use_tqdm=False)
    llm = LLM(model, **BASE, speculative_config=MTP)
    outputs, drafted, accepted, _ = counted(
        llm, lambda: llm.generate(PROMPTS, params, use_tqdm=False)
    )
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert 0.8 * drafted < accepted and drafted > 50
