"""With `batch_invariant` the vectors of a text have the same bits whatever runs beside it, and
however it is cut into steps. Everything here is compared by ==."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxllm_kernels.ragged_self_attention.native import NativeSelfAttention

from jaxllm import LLM, PoolingParams, ValidationError
from jaxllm.testing import VOCAB_SIZE, tiny_config
from tests.profile import TINY

# An encoder computes a text in one step.
SMALL = TINY | {
    "max_num_batched_tokens": 128,
    "batch_invariant": True,
    "check_invariants": True,
    "load_format": "dummy",
    "skip_tokenizer_init": True,
}
# Mixed steps that are beyond the rows of native products otherwise.
LARGE = SMALL | {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "num_gpu_blocks_override": 600,
}
CLASSES = {"id2label": {str(index): f"class {index}" for index in range(5)}}
ENCODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
}
OF_MINILM = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12}
# A family, fields of config.json, and options of the engine.
MODELS = {
    "an encoder with windows and a head": (
        "modernbert",
        {
            "architectures": ["ModernBertForSequenceClassification"],
            "local_attention": 12,
            "classifier_pooling": "mean",
        }
        | CLASSES,
        {},
    ),
    "a decoder with means of chunks and a head": (
        "qwen3",
        {"architectures": ["Qwen3ForSequenceClassification"]} | CLASSES,
        {"pooler_config": {"pooling_type": "MEAN"}},
    ),
}
MORE_MODELS = {
    "BERT": ("bert", {"architectures": ["BertModel"]}, {}),
    "BERT in bfloat16, with the sizes of MiniLM": (
        "bert",
        {"architectures": ["BertModel"]} | OF_MINILM,
        {"dtype": "bfloat16", "pooler_config": {"pooling_type": "MEAN"}},
    ),
    "RoBERTa that classifies, in bfloat16": (
        "roberta",
        {"architectures": ["RobertaForSequenceClassification"]} | CLASSES,
        {"dtype": "bfloat16"},
    ),
    "last tokens": ("llama", {}, {"runner": "pooling"}),
    "last tokens in bfloat16, of int8": (
        "llama",
        {},
        {"runner": "pooling", "dtype": "bfloat16", "quantization": "int8"},
    ),
    "a decoder that classifies, in bfloat16": (
        "qwen2",
        {"architectures": ["Qwen2ForSequenceClassification"]} | CLASSES,
        {"dtype": "bfloat16"},
    ),
    "steps of an answer": (
        "qwen2",
        {"architectures": ["Qwen2ForProcessRewardModel"]} | CLASSES,
        {"pooler_config": {"step_tag_id": 5}},
    ),
    "logits of tokens": (
        "llama",
        {},
        {
            "runner": "pooling",
            "dtype": "bfloat16",
            "pooler_config": {
                "pooling_type": "STEP",
                "step_tag_id": 5,
                "returned_token_ids": [7, 90, 300],
            },
        },
    ),
    "a decoder that sees both sides": (
        "gemma3",
        {"use_bidirectional_attention": True},
        {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}},
    ),
    "experts": ("qwen3_moe", {"head_dim": 32}, {"runner": "pooling"}),
    "states": ("qwen3_next", {}, {"runner": "pooling", "mamba_block_size": 16}),
    "latents": ("deepseek_v3", {}, {"runner": "pooling"}),
}  # fmt: skip


def prompt(index, length):
    return [5 + (index * 131 + i * i * 7 + i) % (VOCAB_SIZE - 5) for i in range(length)]


MINE = [prompt(index, length) for index, length in enumerate([1, 2, 17, 33, 64, 100, 128, 7])]


def start(path, name, options):
    family, fields, more = (MODELS | MORE_MODELS)[name]
    is_encoder = family in ("bert", "roberta", "modernbert")
    base = ENCODER | {"model_type": family} if is_encoder else tiny_config(family)
    path.joinpath("config.json").write_text(json.dumps(base | fields))
    return LLM(path, **options | more)


def vectors(llm, prompts):
    """The bits of the vectors of whole texts, and of all of their tokens, by text. Scores are taken
    before they become probabilities, which would hide their last bits."""
    pooling = llm.llm_engine.info.pooling
    params = PoolingParams(use_activation=pooling.is_embedding)
    of_tasks = (
        [
            output.outputs.data.tobytes()
            for output in llm.encode(prompts, params, pooling_task=task, use_tqdm=False)
        ]
        for task in pooling.tasks
    )
    return list(zip(*of_tasks, strict=True))


def each_alone(llm):
    bits = []
    for text in MINE:
        llm.reset_prefix_cache()
        bits += vectors(llm, [text])
    llm.reset_prefix_cache()
    assert len(set(bits)) == len(MINE)
    return bits


@pytest.mark.parametrize("name", MODELS)
def test_alone_first_last_and_in_a_crowd(tmp_path, name):
    llm = start(tmp_path, name, SMALL)
    alone = each_alone(llm)
    assert vectors(llm, MINE) == alone  # other chunks, too, where prompts are cut
    assert vectors(llm, MINE[::-1]) == alone[::-1]  # and after hits
    others = [prompt(100 + index, 3 + 4 * index) for index in range(12)]
    assert vectors(llm, others + MINE + others)[12:-12] == alone


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("BERT", {"native_kernels": False}, "our own kernels"),
        ("BERT", {"tensor_parallel_size": 2}, "tensor_parallel_size=1"),
        ("last tokens", {"attention_backend": "xla"}, "attention 'xla'"),
        ("last tokens", {"enable_lora": True}, "enable_lora"),
    ],
)
def test_what_does_not_keep_it_is_refused_by_name(tmp_path, name, options, message):
    with pytest.raises(ValidationError, match=f"^batch_invariant=True: .*{message}"):
        start(tmp_path, name, SMALL | options)


def test_self_attention_that_xla_computes_is_refused(tmp_path, monkeypatch):
    def load(library):
        raise ValueError("nothing compiles today")

    monkeypatch.setattr(NativeSelfAttention, "load", load)
    with pytest.raises(ValidationError, match="^batch_invariant=True: self-attention .* 'xla'"):
        start(tmp_path, "BERT", SMALL)


@pytest.fixture(scope="module", params=MODELS | MORE_MODELS)
def large(request, tmp_path_factory):
    """An engine of large steps, and what one of small ones makes of each text alone."""
    path = tmp_path_factory.mktemp("model")
    alone = each_alone(start(path, request.param, SMALL))
    return start(path, request.param, LARGE), alone


@pytest.mark.sweep
@given(
    order=st.permutations(range(len(MINE))),
    others=st.lists(st.integers(1, 128), max_size=56),
    before=st.booleans(),
    resets=st.booleans(),
)
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_crowds_change_no_bit(large, order, others, before, resets):
    """Among up to 56 others, before or behind them, with or without hits, in other steps."""
    llm, alone = large
    if resets:
        llm.reset_prefix_cache()
    own, noise = [MINE[i] for i in order], [prompt(200 + i, n) for i, n in enumerate(others)]
    if before:
        bits = vectors(llm, noise + own)[len(noise) :]
    else:
        bits = vectors(llm, own + noise)[: len(own)]
    assert bits == [alone[i] for i in order]
