import msgspec
import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError
from jaxllm.frontend.input_processor import InputProcessor
from jaxllm.messages import Add, EngineRequest
from jaxllm.sampling.logits_processor import LogitsProcessor
from jaxllm.sampling_params import SamplingParams


@pytest.fixture
def processor(config, info, byte_level):
    return InputProcessor(config, info, byte_level)


def process(processor, prompt="hello", params=None, **options):
    return processor.process("r", prompt, params or SamplingParams(), **options)


def test_all_kinds_of_prompts_become_the_same_ids(processor, byte_level):
    ids = byte_level.encode("hello you")
    for prompt in (
        "hello you",
        ids,
        tuple(ids),
        list(np.array(ids)),
        {"prompt": "hello you"},
        {"prompt_token_ids": ids},
    ):
        processed = process(processor, prompt)
        assert processed.prompt_token_ids == ids
        assert processed.requests[0].prompt_token_ids == ids
    assert process(processor, {"prompt_token_ids": ids, "prompt": "x"}).prompt == "x"
    assert process(processor, ids).prompt is None


def test_request_crosses_the_process_boundary_unchanged(processor):
    params = SamplingParams(
        seed=7, logprobs=2, logit_bias={3: 1.5}, bad_words=["hello"], allowed_token_ids=[1, 2]
    )
    request = process(processor, {"prompt": "a b", "cache_salt": "s"}, params).requests[0]
    packed = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(packed, type=EngineRequest) == request


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        (None, "must be a string"),
        (5, "must be a string"),
        ({}, "must be a string"),
        ({"prompt": 5}, "must be a string"),
        ({"prompt": "a", "multi_modal_data": {"image": "a.png"}}, "reads text alone"),
        ({"prompt": "a", "encoder_prompt": "b"}, "encoder_prompt"),
        (["a", "b"], "integers"),
        ([1, 2.0], "integers"),
        ([1, True], "booleans"),
        ([1, -1], "negative"),
        ([1, 400], "below 400"),
        ([1, 2**70], "below 400"),
        ([1] * 64, "at most 63"),
        ("a\ud800b", "surrogate"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "cache_salt": 3}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "x" * 129}, "128"),
        ({"prompt": "a", "cache_salt": "a/b"}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "a\ud800"}, "cache_salt=.*surrogate"),
        ({"prompt": "a", "cache_salt": "a\0b"}, "cache_salt"),
    ],
)
def test_bad_prompts_are_refused(prompt, message, processor):
    with pytest.raises(ValidationError, match=message) as caught:
        process(processor, prompt)
    assert caught.value.parameter is not None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", float("nan"), "finite"),
        ("stop", 5, "list"),
        ("stop_token_ids", [400], "below 400"),
        ("stop_token_ids", "1", "list"),
        ("stop_token_ids", list(range(2, 130)), "at most 128"),
        ("logit_bias", {400: 1.0}, "below 400"),
        ("allowed_token_ids", [1, 400], "below 400"),
        ("logprobs", 6, "max_logprobs=6"),
        ("logprobs", -1, "max_logprobs=-1"),
        ("prompt_logprobs", 6, "max_logprobs=6"),
        ("bad_words", ["xyzxyzxyzxyzxyzxyzxyz"], "tokens long"),
        ("bad_words", [f"{i:03}" for i in range(100)], "token sequences"),
        ("extra_args", {"a": 1}, "logits processor"),
        ("max_tokens", 0, "between"),
    ],
)
def test_parameters_assigned_after_birth_are_checked_at_the_door(field, value, message, processor):
    params = SamplingParams()
    setattr(params, field, value)
    with pytest.raises(ValidationError, match=message):
        process(processor, "hello", params)


@pytest.mark.parametrize("params", [{"stop": "x"}, {"bad_words": ["x"]}], ids=["stop", "bad_words"])
def test_strings_need_a_tokenizer(params, config, info):
    processor = InputProcessor(config, info, None)
    assert process(processor, [1, 2]).prompt_token_ids == [1, 2]
    with pytest.raises(ValidationError, match="skip_tokenizer_init"):
        process(processor, [1, 2], SamplingParams(**params))
    with pytest.raises(ValidationError, match="prompt_token_ids"):
        process(processor, "hello")


def test_prompt_is_cut_to_its_last_tokens(processor):
    ids = list(range(100))
    assert process(processor, ids, truncate_prompt_tokens=10).prompt_token_ids == ids[-10:]
    assert process(processor, ids, truncate_prompt_tokens=-1).prompt_token_ids == ids[-63:]
    assert process(processor, [1, 2], truncate_prompt_tokens=10).prompt_token_ids == [1, 2]
    for bad in (0, -2, 65, True, "3"):
        with pytest.raises(ValidationError, match="truncate_prompt_tokens"):
            process(processor, ids, truncate_prompt_tokens=bad)


def test_output_is_capped_where_the_context_ends(processor):
    for asked, resolved in ((None, 54), (7, 7), (54, 54), (1000, 54)):
        request = process(processor, [5] * 10, SamplingParams(max_tokens=asked)).requests[0]
        assert request.max_tokens == resolved


def test_n_answers_are_n_engine_requests_with_consecutive_seeds(processor):
    requests = process(processor, "hello", SamplingParams(n=3, seed=-2)).requests
    assert [r.request_id for r in requests] == ["0_r", "1_r", "2_r"]
    assert [r.seed for r in requests] == [2**64 - 2, 2**64 - 1, 0]
    assert [r.prefix_leader_id for r in requests] == [None, "0_r", "0_r"]


def test_n_answers_travel_as_one_message_with_one_prompt(processor):
    params = SamplingParams(n=64, seed=7, prompt_logprobs=1, logit_bias=dict.fromkeys(range(60), 1))
    requests = process(processor, [5] * 60, params).requests
    message = msgspec.msgpack.encode(Add.of(requests))
    alone = msgspec.msgpack.encode(Add.of(requests[:1]))

    assert len(message) - len(alone) < 64 * 16
    assert msgspec.msgpack.decode(message, type=Add).requests() == requests
    assert msgspec.msgpack.decode(alone, type=Add).requests() == requests[:1]


def test_requests_without_a_seed_get_those_of_the_engine_in_order(config, info, byte_level):
    def draw(seed):
        config = EngineConfig.create("tiny", seed=seed)
        processor = InputProcessor(config, info, byte_level)
        return [process(processor).requests[0].seed for _ in range(3)]

    assert draw(1) == draw(1)
    assert len({*draw(1), *draw(2)}) == 6


def test_eos_of_model_and_tokenizer_end_a_request_unless_ignored(config, info, byte_level):
    info.eos_token_ids = [9]
    processor = InputProcessor(config, info, byte_level)
    params = SamplingParams(stop_token_ids=[5, 5, 6])
    request = process(processor, "hello", params).requests[0]
    assert processor.eos_token_ids == [byte_level.eos_token_id, 9]
    # Only the end of sequence proper is not told as the reason to stop.
    assert request.eos_token_ids == [byte_level.eos_token_id]
    assert request.stop_token_ids == [5, 6, 9]
    ignoring = process(processor, "hello", SamplingParams(ignore_eos=True)).requests[0]
    assert ignoring.eos_token_ids == ignoring.stop_token_ids == []
    without = InputProcessor(config, info, None)
    assert process(without, [5], SamplingParams()).requests[0].eos_token_ids == [9]


def test_bad_words_are_banned_at_the_head_of_a_text_and_after_a_space(processor, byte_level):
    request = process(processor, "a", SamplingParams(bad_words=["hello", "hello"])).requests[0]
    assert request.bad_word_ids == [
        byte_level.encode("hello", add_special_tokens=False),
        byte_level.encode(" hello", add_special_tokens=False),
    ]


def test_all_logprobs_means_the_size_of_the_vocabulary(config, info, byte_level):
    info.max_logprobs = info.vocab_size
    processor = InputProcessor(config, info, byte_level)
    processed = process(processor, "a", SamplingParams(logprobs=-1, prompt_logprobs=-1))
    assert processed.params.logprobs == processed.params.prompt_logprobs == 400


def test_what_the_user_handed_in_is_neither_kept_nor_changed(processor):
    prompt = [5, 6, 7]
    params = SamplingParams(
        max_tokens=1000, logprobs=1, stop=["x"], stop_token_ids=[4], allowed_token_ids=[4]
    )
    before = msgspec.msgpack.encode(params)
    processed = process(processor, prompt, params)
    assert msgspec.msgpack.encode(params) == before
    prompt.append(8)
    processed.prompt_token_ids.append(9)
    for values in (params.stop, params.stop_token_ids, params.allowed_token_ids):
        values.append("changed")
    request = processed.requests[0]
    assert request.prompt_token_ids == [5, 6, 7]
    assert request.sampling_params.stop == ["x"]
    assert request.sampling_params.stop_token_ids == request.stop_token_ids == [4]
    assert request.sampling_params.allowed_token_ids == [4]


def test_priority_is_carried_or_refused(processor, info, byte_level):
    for given in (-5, np.int64(-5)):
        assert process(processor, priority=given).requests[0].priority == -5
    for bad in (1.0, True, None, 2**63):
        with pytest.raises(ValidationError, match="priority"):
            process(processor, priority=bad)
    fcfs = InputProcessor(EngineConfig.create("tiny"), info, byte_level)
    assert process(fcfs, priority=0).requests[0].priority == 0
    with pytest.raises(ValidationError, match="scheduling_policy='priority'"):
        process(fcfs, priority=1)


class _Boost(LogitsProcessor):
    num_params = 1

    def encode(self, params):
        if not params.extra_args:
            return None
        if "boost" not in params.extra_args:
            raise ValueError("give 'boost'")
        return [params.extra_args["boost"]]


def test_logits_processors_check_their_arguments_at_the_door(info, byte_level):
    config = EngineConfig.create("tiny", logits_processors=(_Boost,))
    processor = InputProcessor(config, info, byte_level)
    given = {"boost": 1.0, "list": [1]}
    processed = process(processor, "a", SamplingParams(extra_args=given))
    given["list"].append(2)
    assert processed.params.extra_args == {"boost": 1.0, "list": [1]}
    for bad, message in (({"x": 1}, "give 'boost'"), ({"boost": object()}, "plain data")):
        with pytest.raises(ValidationError, match=message):
            process(processor, "a", SamplingParams(extra_args=bad))


def test_wrong_kinds_of_id_and_params_are_refused(processor):
    with pytest.raises(ValidationError, match="request_id"):
        processor.process("", "hello", SamplingParams())
    with pytest.raises(ValidationError, match="SamplingParams"):
        processor.process("r", "hello", {"n": 1})


def test_masks_that_leave_no_token_are_refused(processor, byte_level):
    [word], [spaced] = ([byte_level.encode(text)[-1]] for text in ("#", " #"))
    assert byte_level.encode("#", add_special_tokens=False) == [word]
    banned = SamplingParams(allowed_token_ids=[word], bad_words=["#"])
    with pytest.raises(ValidationError, match="allowed_token_ids.*bad_words would leave none"):
        process(processor, params=banned)
    assert process(processor, params=banned.clone(allowed_token_ids=[word, 7])).requests
    # What is left by the bad words alone may be put off by min_tokens.
    both = banned.clone(allowed_token_ids=[word, 7], stop_token_ids=[7], min_tokens=1)
    with pytest.raises(ValidationError, match="bad_words and min_tokens=1"):
        process(processor, params=both)


def test_n_answers_share_their_parameters(processor):
    params = SamplingParams(n=4, allowed_token_ids=[5, 6], prompt_logprobs=1)
    first, *others = (r.sampling_params for r in process(processor, params=params).requests)
    assert first.prompt_logprobs == 1
    assert all(other is others[0] for other in others) and others[0].prompt_logprobs is None


@pytest.mark.parametrize("arrival_time", ["now", float("nan"), float("inf")])
def test_arrival_time_must_be_a_number(processor, arrival_time):
    with pytest.raises(ValidationError, match="arrival_time"):
        process(processor, arrival_time=arrival_time)


def test_allowed_tokens_must_leave_one_that_does_not_end_the_output(processor):
    params = SamplingParams(allowed_token_ids=[5, 6], stop_token_ids=[5, 6], min_tokens=2)
    with pytest.raises(ValidationError, match="allowed_token_ids.*min_tokens=2"):
        process(processor, params=params)
    assert process(processor, params=params.clone(min_tokens=0)).requests
    assert process(processor, params=params.clone(stop_token_ids=[5])).requests
