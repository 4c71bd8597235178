"""Whatever a user gets wrong is said at once, with what was given and what to do about it, and
harms nobody else. What concerns the start is said before anything is compiled."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, SamplingParams
from jaxllm.errors import (
    CheckpointError,
    JaxLLMError,
    OutOfMemoryError,
    UnsupportedModelError,
    ValidationError,
)
from jaxllm.programs.compile import compilation_counter
from jaxllm.testing import make_tiny_checkpoint

OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "kv_cache_memory_bytes": 4 << 20,
    "max_logprobs": 5,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def start():
    """Start an engine."""

    def start(model, **options):
        return LLM(str(model), **{**OPTIONS, **options})

    return start


@pytest.fixture(scope="module")
def llm(model, start):
    return start(model, enforce_eager=True)


@pytest.fixture
def refused(start):
    """Start an engine that must not start; return why it did not."""

    def refuse(model, kind, **options):
        before = compilation_counter.compiles
        with pytest.raises(JaxLLMError) as caught:
            start(model, **options)
        assert type(caught.value) is kind
        assert compilation_counter.compiles == before
        return str(caught.value)

    return refuse


def assert_says(message, *parts):
    missing = [part for part in parts if part not in message]
    assert not missing, message


# ---- requests


GOOD = [5, 6, 7]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def assigned(name, value):
    """Parameters with a field that was assigned after construction."""
    params = SamplingParams()
    setattr(params, name, value)
    return params


BAD_REQUESTS = [
    ([], GREEDY, ["empty", "at least one token"]),
    ({"prompt_token_ids": []}, GREEDY, ["prompt=[]", "empty"]),
    ([5, 384], GREEDY, ["prompt_token_ids=384", "below 384"]),
    ([5, -1], GREEDY, ["prompt_token_ids=-1", "negative"]),
    ([5, 2.5], GREEDY, ["prompt_token_ids=2.5", "integers"]),
    (["a", 5], GREEDY, ["prompt_token_ids='a'", "integers"]),
    ({"text": "a"}, GREEDY, ["'text'", "'prompt_token_ids'"]),
    (None, GREEDY, ["prompt=None", "list of token ids"]),
    (np.array([5, 6]), GREEDY, ["array([5, 6])", "list of token ids"]),
    (
        [5] * 64,
        GREEDY,
        ["64 tokens", "max_model_len=64", "at most 63", "truncate_prompt_tokens"],
    ),
    (GOOD, {"temperature": 0}, ["sampling_params", "must be a SamplingParams"]),
    (GOOD, "hot", ["sampling_params='hot'", "must be a SamplingParams"]),
    (GOOD, assigned("temperature", float("nan")), ["temperature=nan", "finite"]),
    (GOOD, assigned("temperature", "warm"), ["temperature='warm'", "a number"]),
    (GOOD, assigned("max_tokens", 0), ["max_tokens=0", "between 1"]),
    (GOOD, assigned("top_p", 0.0), ["top_p=0.0", "above 0"]),
    (GOOD, assigned("stop", [""]), ["stop", "non-empty"]),
    (GOOD, assigned("logprobs", 6), ["logprobs=6", "max_logprobs=5", "max_logprobs=6"]),
    (GOOD, assigned("prompt_logprobs", -1), ["prompt_logprobs=-1", "max_logprobs=-1"]),
    (GOOD, assigned("allowed_token_ids", [400]), ["allowed_token_ids=400", "below 384"]),
    (GOOD, assigned("logit_bias", {400: 1.0}), ["logit_bias=400", "below 384"]),
    (GOOD, assigned("extra_args", {"a": 1}), ["extra_args={'a': 1}", "logits_processors"]),
]


@pytest.mark.parametrize(("prompt", "params", "parts"), BAD_REQUESTS)
def test_bad_request_is_refused_and_leaves_nothing_behind(llm, prompt, params, parts):
    with pytest.raises(ValidationError) as caught:
        llm.generate([prompt], [params], use_tqdm=False)
    assert_says(str(caught.value), *parts)
    assert caught.value.parameter
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(("prompt", "params", "parts"), BAD_REQUESTS)
def test_bad_request_among_good_ones_queues_none_of_them(llm, prompt, params, parts):
    with pytest.raises(ValidationError):
        llm.enqueue([GOOD, prompt, GOOD], [GREEDY, params, GREEDY])
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_engine_answers_after_all_these_as_before(llm):
    [before] = llm.generate([GOOD], GREEDY, use_tqdm=False)
    for prompt, params, _ in BAD_REQUESTS:
        with pytest.raises(ValidationError):
            llm.generate([GOOD, prompt], [GREEDY, params], use_tqdm=False)
    [after] = llm.generate([GOOD], GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert llm.llm_engine.stats().num_blocks_used == 0


def test_bad_request_does_not_disturb_one_that_runs(llm):
    engine = llm.llm_engine
    [expected] = llm.generate([GOOD], GREEDY, use_tqdm=False)
    engine.add_request("good", GOOD, GREEDY)
    outputs = engine.step()
    for prompt, params, _ in BAD_REQUESTS:
        with pytest.raises(ValidationError):
            engine.add_request("bad", prompt, params)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"good"}
    assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids


def test_duplicate_request_id_is_refused_while_the_first_one_runs(llm):
    engine = llm.llm_engine
    engine.add_request("same", GOOD, GREEDY)
    with pytest.raises(ValidationError, match="request_id='same' is already in use"):
        engine.add_request("same", [8, 9], GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [out.prompt_token_ids for out in outputs if out.finished] == [GOOD]
    engine.add_request("same", [8, 9], GREEDY)
    engine.abort_request("same")


@pytest.mark.parametrize("prompts", [None, 5, np.array([5, 6])], ids=["None", "int", "ndarray"])
def test_prompts_of_a_wrong_type_are_refused(llm, prompts):
    with pytest.raises(ValidationError, match=f"type {type(prompts).__name__}; give a string"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("params", [{"temperature": 0}, "hot", 1])
def test_parameters_of_a_wrong_type_are_refused(llm, params):
    with pytest.raises(ValidationError, match="it must be a SamplingParams"):
        llm.generate(GOOD, params)


def test_no_prompts_have_no_answers(llm):
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_priority_needs_the_policy(llm):
    with pytest.raises(ValidationError, match="priority=3.*scheduling_policy='priority'"):
        llm.generate([GOOD], GREEDY, priority=3)


def test_wrong_number_of_parameters_is_refused(llm):
    with pytest.raises(ValidationError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate([GOOD, GOOD], [GREEDY])


# ---- engine arguments


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"max_num_seq": 4}, ["'max_num_seq'", "did you mean 'max_num_seqs'"]),
        ({"max_num_seqs": 0}, ["max_num_seqs=0", "at least 1"]),
        ({"max_num_seqs": "4"}, ["max_num_seqs='4'", "type str", "int"]),
        ({"dtype": "int8"}, ["dtype='int8'", "'bfloat16'"]),
        ({"block_size": 24}, ["block_size=24", "power of two"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization=1.5", "at most 1"]),
        ({"max_num_seqs": 64}, ["max_num_batched_tokens=32", "max_num_seqs=64"]),
        ({"max_model_len": 4096}, ["max_model_len=4096", "2048", "hf_overrides"]),
        ({"attention_backend": "magic"}, ["attention_backend='magic'", "xla"]),
        ({"scheduling_policy": "lifo"}, ["scheduling_policy='lifo'", "fcfs, priority"]),
        ({"logits_processors": ("nowhere:Nothing",)}, ["nowhere:Nothing", "imported"]),
        (
            {"enable_chunked_prefill": False},
            ["max_num_batched_tokens=32", "max_model_len=64", "enable_chunked_prefill"],
        ),
        (
            {"kv_cache_memory_bytes": 1 << 14},
            ["kv_cache_memory_bytes gives", "max_model_len needs 4", "lower max_model_len"],
        ),
        (
            {"num_gpu_blocks_override": 2},
            ["num_gpu_blocks_override gives 2", "lower max_model_len or raise"],
        ),
    ],
)
def test_bad_engine_arguments_are_refused(refused, model, options, parts):
    assert_says(refused(model, ValidationError, **options), *parts)


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 1 << 40, "kv_cache_memory_bytes": None},
        {"kv_cache_memory_bytes": 1 << 60, "max_num_seqs": 1 << 40, "max_num_batched_tokens": None},
        {
            "hf_overrides": {"num_hidden_layers": 60, "hidden_size": 1 << 16, "head_dim": 128},
            "kv_cache_memory_bytes": None,
        },
    ],
    ids=["num_gpu_blocks_override", "kv_cache_memory_bytes", "hf_overrides"],
)
def test_what_does_not_fit_is_said_before_loading(refused, model, options):
    message = refused(model, OutOfMemoryError, **options, load_format="dummy")
    assert_says(message, "weights", "KV cache", "GiB")


# ---- checkpoints


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of one's own, to damage."""
    return make_tiny_checkpoint(tmp_path / "model")


def edit_config(path, **fields):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_missing_directory(refused, tmp_path):
    message = refused(tmp_path / "nothing", CheckpointError)
    assert_says(message, str(tmp_path / "nothing"), "no such directory")


def test_mistyped_name_is_refused_without_asking_the_hub(refused, monkeypatch):
    def ask(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", ask)
    assert_says(refused("tiny-modell", CheckpointError), "'tiny-modell'", "no such directory")


def test_directory_without_config(refused, checkpoint):
    (checkpoint / "config.json").unlink()
    assert_says(refused(checkpoint, CheckpointError), "config.json", "missing")


def test_config_that_is_not_json(refused, checkpoint):
    (checkpoint / "config.json").write_text("{")
    assert_says(refused(checkpoint, CheckpointError), "config.json", "JSON")


def test_missing_weights(refused, checkpoint):
    (checkpoint / "model.safetensors").unlink()
    message = refused(checkpoint, CheckpointError)
    assert_says(message, str(checkpoint), "safetensors", "load_format='dummy'")


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_weights(refused, checkpoint, keep):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert_says(refused(checkpoint, CheckpointError), "model.safetensors", "truncated")


def test_missing_file_of_several(refused, checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    index = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(weights)}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file(
        {name: weights[name] for name, file in index.items() if file == "part-0.safetensors"},
        checkpoint / "part-0.safetensors",
    )
    message = refused(checkpoint, CheckpointError)
    assert_says(message, "part-1.safetensors", "1 of the 2 files", "download")


def test_missing_tensor(refused, checkpoint):
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file)
    assert_says(refused(checkpoint, CheckpointError), "lacks", "model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"num_hidden_layers": 3}, ["lacks", "model.layers.2."]),
        ({"num_hidden_layers": 1}, ["no place for", "model.layers.1."]),
        ({"hidden_size": 128, "head_dim": 16}, ["disagree", "128", "64"]),
        ({"num_key_value_heads": 4}, ["disagree", "k_proj"]),
        ({"vocab_size": 385}, ["disagree", "385", "384"]),
        ({"tie_word_embeddings": True}, ["lm_head.weight", "hf_overrides"]),
    ],
)
def test_config_and_weights_that_disagree(refused, checkpoint, fields, parts):
    edit_config(checkpoint, **fields)
    assert_says(refused(checkpoint, CheckpointError), *parts)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Qwen3ForCausalLM"]),
        ({"hidden_act": "mish"}, ["'mish'", "silu"]),
        ({"rope_scaling": {"rope_type": "ntk"}}, ["'ntk'", "yarn"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["hqq", "compressed-tensors"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
    ],
)
@pytest.mark.parametrize("source", ["config", "override"])
def test_models_that_cannot_run(refused, checkpoint, fields, parts, source):
    options = {}
    if source == "config":
        edit_config(checkpoint, **fields)
    else:
        options = {"hf_overrides": fields}
    assert_says(refused(checkpoint, UnsupportedModelError, **options), *parts)


@pytest.mark.parametrize("eos", ["2", True, [0, 384], {"id": 0}])
def test_damaged_eos_ids_are_refused_at_start(refused, checkpoint, eos):
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert_says(refused(checkpoint, CheckpointError), "generation_config.json", "eos_token_id")


def test_wrong_generation_config_is_refused_at_start(refused, checkpoint, tmp_path):
    message = refused(checkpoint, ValidationError, generation_config=str(tmp_path / "none"))
    assert_says(message, "generation_config=", "'auto' or 'vllm'")


# ---- tokenizers


def remove_tokenizer(path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()


def test_missing_tokenizer(refused, checkpoint):
    remove_tokenizer(checkpoint)
    message = refused(checkpoint, ValidationError)
    assert_says(message, "tokenizer", str(checkpoint), "skip_tokenizer_init=True")


def test_without_tokenizer_only_what_needs_one_is_refused(start, checkpoint):
    remove_tokenizer(checkpoint)
    llm = start(checkpoint, enforce_eager=True, skip_tokenizer_init=True)
    for prompt, params, message in [
        ("hello", GREEDY, "prompt='hello'.*prompt_token_ids"),
        (GOOD, SamplingParams(stop="x"), "stop.*stop_token_ids"),
        (GOOD, SamplingParams(bad_words=["x"]), "bad_words.*logit_bias"),
    ]:
        with pytest.raises(ValidationError, match=message):
            llm.generate([prompt], params, use_tqdm=False)
    with pytest.raises(ValidationError, match="skip_tokenizer_init"):
        llm.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(ValidationError, match="skip_tokenizer_init"):
        llm.get_tokenizer()
    [output] = llm.generate([GOOD], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].text == ""
