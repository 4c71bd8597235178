"""Encoders that pool: equal to transformers, alone and in a crowd, and with pairs of texts."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm import LLM, ValidationError
from jaxllm.config import EngineConfig
from jaxllm.errors import UnsupportedModelError
from jaxllm.models.architecture import read_architecture
from jaxllm.plan.make_plan import make_plan
from jaxllm.testing import VOCAB_SIZE, tiny_config
from tests.pooling.models import describe, unit, write_model
from tests.profile import TINY

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

QUIET = {"use_tqdm": False}
WHOLE = TINY | {"max_num_batched_tokens": 128, "check_invariants": True}
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
}
CLASSES = {"num_labels": 1}
MODERN = {
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
    "local_attention": 12,
    **dict.fromkeys(["pad_token_id", "eos_token_id", "bos_token_id"], 0),
    **dict.fromkeys(["cls_token_id", "sep_token_id"], 0),
}
# By name: a class of transformers, its config, and fields of that.
MODELS = {
    "bert": ("BertModel", "BertConfig", {}),
    "bert that scores": ("BertForSequenceClassification", "BertConfig", CLASSES),
    "roberta": ("RobertaModel", "RobertaConfig", {"type_vocab_size": 1}),
    "modernbert": ("ModernBertModel", "ModernBertConfig", MODERN),
    "modernbert that scores": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        MODERN | CLASSES | {"classifier_pooling": "mean", "norm_bias": True},
    ),
    "xlm-r that scores": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", CLASSES),
}
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(4, VOCAB_SIZE, size).tolist() for size in (5, 1, 40, 128, 17, 90, 64)]


def write(path, name):
    kind, config_of, fields = MODELS[name]
    config = getattr(transformers, config_of)(**COMMON | fields)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            torch.nn.init.normal_(parameter, mean=parameter.data.mean().item(), std=0.1)
    model.save_pretrained(path)
    return model


def run(model, ids, **more):
    with torch.no_grad():
        return model(torch.tensor([ids]), **more)


def test_texts_are_attended_to_by_our_own_code(tmp_path):
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler is here")
    write(tmp_path, "bert")
    for native_kernels, name in ((True, "native"), (False, "xla")):
        config = EngineConfig.create(str(tmp_path), native_kernels=native_kernels, **WHOLE)
        ops = make_plan(config).state_ops
        assert ops is not None and ops.self_attention.name == name


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_states_of_all_tokens_are_those_of_transformers(tmp_path, name):
    model = write(tmp_path, name)
    llm = LLM(tmp_path, **WHOLE, skip_tokenizer_init=True)
    assert llm.llm_engine.info.max_model_len == 128  # RoBERTa's positions begin at 2
    states = [run(model, ids).last_hidden_state[0].numpy() for ids in PROMPTS]
    outputs = llm.encode(PROMPTS, pooling_task="token_embed", **QUIET)
    for output, state in zip(outputs, states, strict=True):
        np.testing.assert_allclose(output.outputs.data, unit(state), atol=1e-5)
    first = [output.outputs.embedding for output in llm.embed(PROMPTS, **QUIET)]
    np.testing.assert_allclose(first, [unit(state[0]) for state in states], atol=1e-5)
    alone = [llm.embed([ids], **QUIET)[0].outputs.embedding for ids in PROMPTS]
    np.testing.assert_allclose(first, alone, atol=1e-6)


def test_a_classifier_with_a_norm_of_its_own_and_a_mean(tmp_path):
    model = write(tmp_path, "modernbert that scores")
    llm = LLM(tmp_path, **WHOLE, skip_tokenizer_init=True)
    for output, ids in zip(llm.classify(PROMPTS, **QUIET), PROMPTS, strict=True):
        want = torch.sigmoid(run(model, ids).logits[0, 0]).item()
        assert output.outputs.probs == pytest.approx([want], abs=1e-5)


def test_means_and_padding(tmp_path):
    model = write(tmp_path, "bert")
    describe(tmp_path, "pooling_mode_mean_tokens", normalizes=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    llm = LLM(tmp_path, **WHOLE | {"max_model_len": None}, skip_tokenizer_init=True)
    assert llm.llm_engine.info.max_model_len == 100
    prompts = [ids for ids in PROMPTS if len(ids) <= 100]
    want = [run(model, ids).last_hidden_state[0].numpy().mean(0) for ids in prompts]
    got = [output.outputs.embedding for output in llm.embed(prompts, **QUIET)]
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("name", ["bert that scores", "xlm-r that scores"])
def test_pairs_are_scored_with_the_types_of_their_tokens(tmp_path, name):
    model = write(tmp_path, name)
    write_tokenizer(tmp_path, "BERT" if name.startswith("bert") else "RoBERTa")
    llm = LLM(tmp_path, **WHOLE)
    pairs = [("one two", "three"), ("a", "b c d e"), ("four", "four")]
    outputs = llm.score(*map(list, zip(*pairs, strict=True)), **QUIET)
    tokenizer = llm.get_tokenizer()
    for output, pair in zip(outputs, pairs, strict=True):
        encoded = tokenizer(*pair, return_token_type_ids=True)
        assert output.prompt_token_ids == encoded["input_ids"]
        types = {"token_type_ids": torch.tensor([encoded["token_type_ids"]])}
        assert name != "bert that scores" or 1 in encoded["token_type_ids"]
        logit = run(model, encoded["input_ids"], **types).logits[0, 0]
        assert output.outputs.score == pytest.approx(torch.sigmoid(logit).item(), abs=1e-5)
    # The longer text of a pair is cut, and the marks around both stay.
    cut = {"truncate_prompt_tokens": 8}
    (output,) = llm.score("one two three four " * 9, "five", tokenization_kwargs=cut, **QUIET)
    ids = tokenizer("one two three four " * 9, "five", truncation=True, max_length=8)
    assert output.prompt_token_ids == ids["input_ids"]


def write_tokenizer(path, kind):
    """A tokenizer of words that puts marks around texts and between those of a pair."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    # RoBERTa gives the id 1 of padding no position.
    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *"one two three four five a b c d e".split()]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    second = "1" if kind == "BERT" else "0"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 0), ("[SEP]", 2)],
    )
    tokenizer.save(str(path / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (path / "tokenizer_config.json").write_text(json.dumps(described))


def test_what_an_encoder_cannot_do_is_refused(tmp_path):
    write(tmp_path, "bert")
    for options, message in [
        ({"runner": "generate"}, "BertModel is an encoder.*runner='pooling'"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching=True: the model is an encoder"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8': the model is an encoder"),
        ({"max_num_batched_tokens": 64}, "an encoder computes a prompt in one step"),
    ]:
        with pytest.raises((ValidationError, ValueError), match=message):
            LLM(tmp_path, **WHOLE | options, skip_tokenizer_init=True)


def write_gemma(path):
    """A decoder of Gemma's whose tokens see both sides, with layers behind the pooling."""
    config = transformers.Gemma3TextConfig(
        **COMMON | {"num_hidden_layers": 3, "max_position_embeddings": 128},
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_bidirectional_attention=True,
        pad_token_id=0,
        query_pre_attn_scalar=16,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3TextModel(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    describe(path, "pooling_mode_mean_tokens")
    modules = json.loads((path / "modules.json").read_text())
    linears = []
    for index, (size, bias) in enumerate([(96, False), (48, True)], 2):
        folder = path / f"{index}_Dense"
        folder.mkdir()
        linear = torch.nn.Linear(64 if index == 2 else 96, size, bias=bias)
        tensors = {f"linear.{name}": value.numpy() for name, value in linear.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        told = {"in_features": 64, "out_features": size, "bias": bias}
        told["activation_function"] = (
            f"torch.nn.modules.activation.{'Tanh' if bias else 'Identity'}"
        )
        (folder / "config.json").write_text(json.dumps(told))
        kind = "sentence_transformers.base.modules.dense.Dense"
        modules.insert(index, {"idx": index, "path": folder.name, "type": kind})
        linears.append(linear)
    (path / "modules.json").write_text(json.dumps(modules))
    return model, lambda x: torch.tanh(linears[1](linears[0](x)))


def test_a_decoder_whose_tokens_see_both_sides_and_layers_behind_the_pooling(tmp_path):
    model, project = write_gemma(tmp_path)
    llm = LLM(tmp_path, **WHOLE, skip_tokenizer_init=True)
    outputs = llm.embed(PROMPTS, **QUIET)
    for output, ids in zip(outputs, PROMPTS, strict=True):
        with torch.no_grad():
            mean = run(model, ids).last_hidden_state[0].mean(0)
            np.testing.assert_allclose(
                output.outputs.embedding, unit(project(mean).numpy()), atol=1e-5
            )


@pytest.mark.parametrize("window", [None, 12])
def test_a_decoder_that_is_not_causal(tmp_path, window):
    fields = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    path = write_model(tmp_path / "model", "Qwen2Model", "qwen2", **fields if window else {})
    # As in GTE of Qwen2.
    config = json.loads((path / "config.json").read_text()) | {"is_causal": False}
    (path / "config.json").write_text(json.dumps(config))
    describe(path, "pooling_mode_mean_tokens")
    # Without a mask, torch's own attention would be causal.
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    llm = LLM(path, **WHOLE, skip_tokenizer_init=True)
    outputs = llm.embed(PROMPTS, **QUIET)
    for output, ids in zip(outputs, PROMPTS, strict=True):
        with torch.no_grad():
            mean = run(model, ids).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(output.outputs.embedding, unit(mean), atol=1e-5)


def test_two_fields_that_read_a_window_differently_are_refused():
    both = {"is_causal": False, "use_bidirectional_attention": True}
    with pytest.raises(UnsupportedModelError, match="is_causal=False and use_bidirectional"):
        read_architecture(tiny_config("mistral") | both, pools=True)
