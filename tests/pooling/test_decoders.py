"""Decoders that pool: equal to transformers, and to themselves however the steps are cut."""

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, PoolerConfig, PoolingParams, SamplingParams, ValidationError
from jaxllm.config import EngineConfig
from jaxllm.errors import CheckpointError
from jaxllm.files import read_json
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer, num_programs
from jaxllm.programs.report import report_plan
from jaxllm.testing import make_tiny_checkpoint
from tests.pooling.models import TEXTS, describe, hidden_states, unit, write_model
from tests.profile import TINY

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

QUIET: dict[str, Any] = {"use_tqdm": False}
LONG = " ".join(TEXTS)
WORDS = {"query": "Find: ", "document": ""}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("embedder"), "Qwen3Model", is_matryoshka=True)
    return describe(path, "pooling_mode_lasttoken", prompts=WORDS)


@pytest.fixture(scope="module")
def llm(embedder):
    return LLM(embedder, **TINY, check_invariants=True)


def embeddings(llm, prompts, **how):
    outputs = llm.embed(prompts, **how, **QUIET)
    return np.array([output.outputs.embedding for output in outputs])


def ids_of(llm, texts):
    return [llm.llm_engine.tokenizer.encode(text) for text in texts]


def expected(path, ids, pool):
    return np.array([unit(pool(hidden)) for hidden in hidden_states(path, ids)])


def test_last_tokens_are_those_of_transformers(llm, embedder):
    texts = [*TEXTS, LONG]  # the longest takes several steps
    want = expected(embedder, ids_of(llm, texts), lambda hidden: hidden[-1])
    np.testing.assert_allclose(embeddings(llm, texts), want, atol=1e-5)


@pytest.mark.parametrize("how", ["MEAN", "CLS"])
def test_sums_over_chunks_are_those_of_whole_prompts(embedder, how):
    llm = LLM(embedder, **TINY, pooler_config=PoolerConfig(pooling_type=how))
    texts = [*TEXTS, LONG]
    pool = {"MEAN": lambda hidden: hidden.mean(0), "CLS": lambda hidden: hidden[0]}[how]
    want = expected(embedder, ids_of(llm, texts), pool)
    # The second time nothing is taken from the prefix cache: it has no hidden states.
    for _ in range(2):
        np.testing.assert_allclose(embeddings(llm, texts), want, atol=1e-5)


def test_a_cached_prefix_changes_nothing(llm):
    llm.reset_prefix_cache()
    first, second = (llm.embed([LONG], **QUIET)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 and second.num_cached_tokens > 0
    np.testing.assert_allclose(first.outputs.embedding, second.outputs.embedding, atol=1e-6)


def test_alone_and_in_a_crowd(llm):
    llm.reset_prefix_cache()
    together = embeddings(llm, TEXTS * 3)
    alone = np.concatenate([embeddings(llm, text) for text in TEXTS])
    np.testing.assert_allclose(together, np.tile(alone, (3, 1)), atol=1e-6)


def test_preempted_prompts_have_the_same_vectors(embedder, llm):
    few = TINY | {"num_gpu_blocks_override": 9}
    crowded = LLM(embedder, **few, check_invariants=True)
    texts = [LONG[place:] for place in range(6)]
    np.testing.assert_allclose(embeddings(crowded, texts), embeddings(llm, texts), atol=1e-5)
    tokens = crowded.encode(texts, pooling_task="token_embed", **QUIET)
    for output, hidden in zip(tokens, hidden_states(embedder, ids_of(llm, texts)), strict=True):
        assert output.outputs is not None
        np.testing.assert_allclose(output.outputs.data, unit(hidden), atol=1e-5)


def test_every_token_has_a_vector(llm, embedder):
    outputs = llm.encode([*TEXTS, LONG], pooling_task="token_embed", **QUIET)
    for output, ids in zip(outputs, ids_of(llm, [*TEXTS, LONG]), strict=True):
        (hidden,) = hidden_states(embedder, [ids])
        np.testing.assert_allclose(output.outputs.data, unit(hidden), atol=1e-5)


def test_dimensions_are_cut_before_the_length_is_one(llm, embedder):
    want = [unit(hidden[-1][:10]) for hidden in hidden_states(embedder, ids_of(llm, TEXTS))]
    got = embeddings(llm, TEXTS, pooling_params=PoolingParams(dimensions=10))
    np.testing.assert_allclose(got, want, atol=1e-5)
    plain = embeddings(llm, TEXTS, pooling_params=PoolingParams(use_activation=False))
    np.testing.assert_allclose(unit(plain), embeddings(llm, TEXTS), atol=1e-6)
    assert np.linalg.norm(plain, axis=1).max() > 1.1


def test_words_of_a_purpose_are_put_before_a_text(llm):
    named = embeddings(llm, TEXTS, prompt_name="query")
    spelt = embeddings(llm, [WORDS["query"] + text for text in TEXTS])
    np.testing.assert_array_equal(named, spelt)


def test_scores_of_an_embedder_are_cosines(llm):
    vectors = embeddings(llm, TEXTS)
    scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:], **QUIET)]
    np.testing.assert_allclose(scores, vectors[1:] @ vectors[0], atol=1e-6)
    paired = [output.outputs.score for output in llm.score(TEXTS[1:], TEXTS[:-1], **QUIET)]
    np.testing.assert_allclose(paired, (vectors[1:] * vectors[:-1]).sum(1), atol=1e-6)


def test_texts_are_cut_at_their_end_and_may_fill_the_context(llm):
    ids = ids_of(llm, [LONG])[0]
    cut = llm.embed(LONG, tokenization_kwargs={"truncate_prompt_tokens": 20}, **QUIET)[0]
    assert cut.prompt_token_ids == ids[:20]
    left = {"truncate_prompt_tokens": 20, "truncation_side": "left"}
    assert llm.embed(LONG, tokenization_kwargs=left, **QUIET)[0].prompt_token_ids == ids[-20:]
    full = [7] * 128
    assert llm.embed([full], **QUIET)[0].prompt_token_ids == full
    with pytest.raises(ValidationError, match="129 tokens.* at most 128"):
        llm.embed([[7] * 129], **QUIET)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda llm: llm.generate("a", SamplingParams()), "pools .* generates no text"),
        (lambda llm: llm.classify("a"), "task='classify': the engine runs the model for embed"),
        (lambda llm: llm.encode("a"), "pooling_task=None"),
        (lambda llm: llm.encode("a", pooling_task="score"), "it is now called 'classify'"),
        (lambda llm: llm.embed("a", pooling_params=PoolingParams(dimensions=65)), "has 64"),
        (lambda llm: llm.embed("a", prompt_name="passage"), "'query', 'document'"),
        (lambda llm: llm.score(["a", "b"], ["a", "b", "c"]), "2 texts"),
        (lambda llm: llm.embed("a", tokenization_kwargs={"padding": True}), "padding"),
        (lambda llm: llm.embed(""), "it is empty"),
    ],
)
def test_refusals_name_the_field(llm, ask, message):
    with pytest.raises(ValidationError, match=message):
        ask(llm)
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_engine_that_generates_does_not_pool(embedder):
    with pytest.raises(ValidationError, match="runner='pooling'"):
        LLM(embedder, **TINY, runner="generate", convert="embed")
    with pytest.raises(ValidationError, match="speculative_config"):
        LLM(embedder, **TINY, spec_method="ngram")


def test_a_plan_has_no_step_that_samples(embedder):
    plan = make_plan(EngineConfig.create(embedder, **TINY))
    report = report_plan(plan, context=32, all_programs=False)
    assert [program.num_decodes for program in report.programs] == [0]
    assert len(declare_programs(plan, make_packer(plan).layouts)) == num_programs(plan)


def test_classes_have_the_probabilities_of_transformers(tmp_path):
    names = {0: "bad", 1: "so-so", 2: "good"}
    path = write_model(tmp_path, "LlamaForSequenceClassification", "llama", id2label=names)
    llm = LLM(path, **TINY)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0] for ids in ids_of(llm, TEXTS)]
    probs = [output.outputs.probs for output in llm.classify(TEXTS, **QUIET)]
    np.testing.assert_allclose(probs, torch.stack(logits).softmax(-1), atol=1e-5)
    plain = llm.classify(TEXTS, pooling_params=PoolingParams(use_activation=False), **QUIET)
    np.testing.assert_allclose(
        [output.outputs.probs for output in plain], torch.stack(logits), atol=1e-4
    )
    pooling = llm.llm_engine.info.pooling
    assert pooling is not None and pooling.labels == tuple(names.values())


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_that_answers_yes_or_no(tmp_path, tied):
    path = write_model(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=tied)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["a", "b"],
        "is_original_qwen3_reranker": True,
    }
    llm = LLM(path, **TINY, hf_overrides=overrides)
    no, yes = (llm.get_tokenizer().convert_tokens_to_ids(word) for word in "ab")
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    outputs = llm.score("Query: what? ", TEXTS, **QUIET)
    for output, text in zip(outputs, TEXTS, strict=True):
        ids = ids_of(llm, ["Query: what? " + text])[0]
        assert output.prompt_token_ids == ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        want = torch.sigmoid(logits[yes] - logits[no]).item()
        assert output.outputs.score == pytest.approx(want, abs=1e-5)


def test_tokens_of_a_reranker_are_those_of_its_vocabulary(tmp_path):
    path = make_tiny_checkpoint(tmp_path, vocab_size=64)
    overrides = {
        "architectures": ["LlamaForSequenceClassification"],
        "classifier_from_token": ["a", "b"],
    }
    with pytest.raises(CheckpointError, match="classifier_from_token.*below vocab_size=64"):
        make_plan(EngineConfig.create(str(path), **TINY, hf_overrides=overrides))


STEP = 7  # the id of a token


def process_reward_model(path):
    """A decoder, two layers behind it, and the scores of its steps."""
    write_model(path, "Qwen2Model", "qwen2")
    rng = np.random.default_rng(0)
    shapes = {"0.weight": (64, 64), "0.bias": (64,), "2.weight": (2, 64), "2.bias": (2,)}
    score = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    tensors = load_file(path / "model.safetensors")
    tensors = {f"model.{name}": value for name, value in tensors.items()}
    tensors["lm_head.weight"] = np.zeros((384, 64), np.float32)  # releases have it, too
    tensors |= {f"score.{name}": value for name, value in score.items()}
    want = [
        np.maximum(hidden @ score["0.weight"].T + score["0.bias"], 0) @ score["2.weight"].T
        + score["2.bias"]
        for hidden in hidden_states(path, PROMPTS)
    ]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = read_json(path / "config.json") | {"architectures": ["Qwen2ForProcessRewardModel"]}
    (path / "config.json").write_text(json.dumps(config))
    return want


# Steps of 32 tokens cut the second one; the last has no step.
PROMPTS = [[5, 6, STEP, 9, STEP], [*range(10, 50), STEP, *range(50, 80), STEP], [STEP], [5, 6]]


def at(ids, rows):
    return rows[np.array(ids) == STEP]


def softmax(rows):
    powers = np.exp(rows - rows.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def test_steps_of_an_answer_are_scored(tmp_path):
    want = process_reward_model(tmp_path)
    llm = LLM(tmp_path, **TINY, pooler_config={"step_tag_id": STEP})
    outputs = llm.encode(PROMPTS, pooling_task="token_classify", **QUIET)
    for ids, output, rows in zip(PROMPTS, outputs, want, strict=True):
        assert output.outputs.data.shape == (ids.count(STEP), 2)
        np.testing.assert_allclose(output.outputs.data, softmax(at(ids, rows)), atol=1e-5)
    of_others = PoolingParams(step_tag_id=6, returned_token_ids=[1], use_activation=False)
    (output,) = llm.encode(PROMPTS[:1], of_others, pooling_task="token_classify", **QUIET)
    np.testing.assert_allclose(output.outputs.data, want[0][1:2, 1:], atol=1e-4)
    # A probability stays what it is if others are left out.
    (output,) = llm.encode(
        PROMPTS[:1], PoolingParams(returned_token_ids=[1]), pooling_task="token_classify", **QUIET
    )
    right = softmax(at(PROMPTS[0], want[0]))[:, 1:]
    np.testing.assert_allclose(output.outputs.data, right, atol=1e-5)
    for params, task, message in [
        (PoolingParams(step_tag_id=384), "token_classify", "no such token"),
        (PoolingParams(returned_token_ids=[2]), "token_classify", "there are 2 numbers"),
        (PoolingParams(step_tag_id=7), "classify", "step_tag_id=7: 'classify' has one vector"),
    ]:
        with pytest.raises(ValidationError, match=message):
            llm.encode("a", params, pooling_task=task, **QUIET)


@pytest.mark.parametrize(
    "family", ["phi", *(pytest.param(one, marks=pytest.mark.sweep) for one in ("qwen3", "gemma2"))]
)
def test_logits_of_some_tokens_are_scores_of_steps(tmp_path, family):
    """As in reward models that answer each step with one of two tokens. Phi's head has biases,
    Gemma's logits have a cap."""
    path = write_model(tmp_path, f"{family.capitalize()}ForCausalLM", family)
    if family == "phi":
        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.bias"] = np.linspace(-2, 2, 384, dtype=np.float32)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    good, bad = 11, 8
    pooler = {"pooling_type": "STEP", "step_tag_id": STEP, "returned_token_ids": [good, bad]}
    llm = LLM(path, **TINY, runner="pooling", pooler_config=pooler)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    outputs = llm.encode(PROMPTS, pooling_task="token_classify", **QUIET)
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0].numpy() for ids in PROMPTS]
    for ids, output, rows in zip(PROMPTS, outputs, logits, strict=True):
        want = softmax(at(ids, rows[:, [good, bad]]))
        np.testing.assert_allclose(output.outputs.data, want, atol=1e-5)
    other = PoolingParams(returned_token_ids=[bad], use_activation=False)
    (output,) = llm.encode(PROMPTS[:1], other, pooling_task="token_classify", **QUIET)
    np.testing.assert_allclose(output.outputs.data, at(PROMPTS[0], logits[0])[:, [bad]], atol=1e-4)
    (output,) = llm.classify(PROMPTS[:1], **QUIET)
    np.testing.assert_allclose(output.outputs.probs, softmax(logits[0][-1, [good, bad]]), atol=1e-5)
    with pytest.raises(ValidationError, match=r"there are scores of \[11, 8\]"):
        params = PoolingParams(returned_token_ids=[9])
        llm.encode("a", params, pooling_task="token_classify", **QUIET)


@pytest.mark.parametrize(
    ("pooler", "message"),
    [
        ({"step_tag_id": 3}, "step_tag_id=3: it needs pooling_type 'STEP'"),
        ({"pooling_type": "STEP", "step_tag_id": 384}, "step_tag_id=384: no such token"),
        ({"pooling_type": "STEP", "step_tag_id": -1}, "step_tag_id=-1: it must be the id"),
        ({"pooling_type": "STEP", "returned_token_ids": []}, r"returned_token_ids=\[\]: it must"),
        ({"pooling_type": "STEP", "returned_token_ids": [64]}, "there are 64 numbers"),
        ({"pooling_type": "SUM"}, "pooling_type='SUM': give one of CLS, LAST, MEAN, ALL, STEP"),
        ({"seq_pooling_type": "STEP"}, "seq_pooling_type='STEP': give one of CLS, LAST, MEAN"),
    ],
)
def test_steps_that_nobody_takes_are_refused(embedder, pooler, message):
    with pytest.raises(ValidationError, match=message):
        make_plan(EngineConfig.create(embedder, **TINY, pooler_config=pooler))


def test_in_16_bits_vectors_point_the_same_way(embedder, llm):
    half = LLM(embedder, **TINY | {"dtype": "bfloat16"})
    cosines = (embeddings(half, TEXTS) * embeddings(llm, TEXTS)).sum(1)
    assert cosines.min() > 0.9999


def test_a_head_of_another_name_is_left_out(tmp_path):
    path = make_tiny_checkpoint(tmp_path, "gpt_neox")
    llm = LLM(path, **TINY, runner="pooling")
    outputs = llm.embed(TEXTS, **QUIET)
    expected = hidden_states(path, [output.prompt_token_ids for output in outputs])
    for output, hidden in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output.outputs.embedding, unit(hidden[-1]), atol=1e-5)
