"""What a body may say: each field works, is neutral, or is refused by its name."""

import copy
import dataclasses
import typing

import pytest

from jaxllm import SamplingParams, ValidationError
from jaxllm.config import EngineConfig
from jaxllm.errors import refused
from jaxllm.frontend.fill_in_the_middle import _FAMILIES, fill_in, find_marks
from jaxllm.frontend.prompt_length import PromptLength
from jaxllm.frontend.tokenizer import Tokenizer, load_tokenizer
from jaxllm.openai.endpoints import ENDPOINTS, find_endpoint
from jaxllm.openai.errors import AnswerError, NotFoundError, error_body
from jaxllm.openai.served_model import ServedModel
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.testing import make_tiny_checkpoint

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NEEDED = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, COMPLETIONS: {"prompt": "Hi"}}
SERVED = ServedModel(
    names=("a", "b"),
    tokenizer=None,
    default_params=SamplingParams(temperature=0.6, top_k=20),
    fingerprint="fp",
    max_model_len=100,
)

# For the fields that both endpoints hand to the sampler as they are.
SAMPLING = {
    "n": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.4,
    "repetition_penalty": 1.2,
    "seed": 11,
    "stop": ["x", "y"],
    "stop_token_ids": [4, 5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "max_tokens": 9,
    "min_tokens": 2,
    "prompt_logprobs": 1,
    "logit_bias": {7: 1.5},
    "allowed_token_ids": [7, 8, 9],
    "bad_words": ["no"],
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))
    return load_tokenizer(EngineConfig.create(path).model, path)


@pytest.fixture(params=ENDPOINTS)
def path(request) -> str:
    return request.param


def read(path: str, **fields):
    return find_endpoint(path).request.read(NEEDED[path] | fields)


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_fields_reach_the_sampler(path, name):
    # JSON objects have string keys.
    in_json = {"7": 1.5} if name == "logit_bias" else SAMPLING[name]
    params = read(path, **{name: in_json}).sampling_params(SERVED)
    assert getattr(params, name) == SAMPLING[name]


def test_what_is_not_said_is_the_model_s_default(path):
    params = read(path, temperature=None, top_p=0.5).sampling_params(SERVED)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.5)
    assert params.output_kind is RequestOutputKind.FINAL_ONLY


def test_extra_arguments_are_for_logits_processors(path):
    assert read(path, vllm_xargs={"a": 1}).sampling_params(SERVED).extra_args == {"a": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", None),
        ("user", "me"),
        ("metadata", {"a": "b"}),
        ("stream", False),
        ("stream_options", None),
        ("response_format", {"type": "text"}),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),  # among no tools
        ("store", False),
        ("service_tier", "auto"),
        ("best_of", 1),
        ("length_penalty", 1),
        ("suffix", None),
    ],
)
def test_neutral_values_are_accepted(path, name, value):
    read(path, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("functions", [{"name": "f"}], "not supported; leave it out"),
        ("stream", True, "stream=True: not supported; leave it out or give False"),
        ("guided_json", {"type": "object"}, "it is now called structured_outputs.json"),
        ("guided_regex", "a", "it is now called structured_outputs.regex"),
        ("response_format", {"type": "xml"}, "response_format.type='xml'"),
        ("structured_outputs", {"regx": "a"}, "regx"),
        ("use_beam_search", True, "not supported"),
        ("temprature", 1, "unknown field 'temprature'; did you mean 'temperature'?"),
        ("n", "two", "n='two': Expected int | null, got str"),
        ("max_tokens", 1.5, "max_tokens=1.5: Expected int"),
        ("ignore_eos", 1, "ignore_eos=1: Expected bool"),
        ("chat_template", "{{ 1 }}", "not supported; leave it out"),
    ],
)
def test_what_is_refused_is_named(path, name, value, message):
    with pytest.raises(ValidationError) as caught:
        read(path, **{name: value})
    assert (caught.value.parameter or "").partition(".")[0] == name
    assert message in str(caught.value)


def test_the_place_of_a_wrong_value_is_named(path):
    with pytest.raises(ValidationError, match=r"^stop\[1\]=2: Expected str, got int$") as caught:
        read(path, stop=["a", 2])
    assert caught.value.parameter == "stop[1]"
    with pytest.raises(ValidationError, match=r"^stream_options.include_usage=3: Expected bool"):
        ENDPOINTS[path].request.read(
            NEEDED[path] | {"stream": True, "stream_options": {"include_usage": 3}}, live=True
        )


@pytest.mark.parametrize(
    ("path", "fields", "name", "message"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": -2}, "top_logprobs", "top_logprobs=-2: it must"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens=0:"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens=0: it must"),
        (
            CHAT,
            {"max_completion_tokens": 3, "min_tokens": 5},
            "min_tokens",
            "min_tokens=5: it must be at most max_completion_tokens=3",
        ),
        (COMPLETIONS, {"logprobs": -2}, "logprobs", "logprobs=-2: it must"),
        (COMPLETIONS, {"logprobs": -2, "echo": True}, "logprobs", "logprobs=-2: it must"),
    ],
)
def test_parameters_of_the_sampler_are_refused_under_the_request_s_names(
    path, fields, name, message
):
    with pytest.raises(ValidationError) as caught:
        read(path, **fields).sampling_params(SERVED)
    assert caught.value.parameter == name
    assert str(caught.value).startswith(message)


def test_an_error_of_the_engine_names_the_prompt_that_was_sent():
    def told(path, place, error, **fields):
        told = read(path, **fields).in_its_words(error, place)
        return told.parameter, str(told)

    wrong = refused("prompt_token_ids", 9, "no such token")
    several = {"prompt": ["a", [9]]}
    assert told(COMPLETIONS, 1, wrong, **several) == ("prompt[1]", "prompt[1]=9: no such token")
    assert told(COMPLETIONS, 0, wrong, prompt=[9]) == ("prompt", "prompt=9: no such token")
    long = ValidationError("the prompt has 9 tokens", parameter="prompt")
    assert told(CHAT, 0, long) == ("messages", "messages: the prompt has 9 tokens")
    extra = refused("extra_args", {}, "no processor")
    assert told(CHAT, 0, extra) == ("vllm_xargs", "vllm_xargs={}: no processor")


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"best_of": 2}, "best_of=2: not supported; leave it out or give 1"),
        (CHAT, {"best_of": True}, "best_of=True: not supported"),
        (CHAT, {"suffix": "b"}, "suffix='b': not supported"),
        (COMPLETIONS, {"documents": [{}]}, "documents=[{}]: not supported; leave it out"),
        (CHAT, {"prompt_embeds": "x"}, "prompt_embeds='x': not supported; leave it out"),
        (COMPLETIONS, {"prompt_embeds": {}}, "prompt_embeds={}: Expected"),
        (CHAT, {"logprobs": 2}, "logprobs=2: Expected bool"),
        (CHAT, {"messages": "Hi"}, "messages='Hi': Expected array"),
        (CHAT, {"prompt": "Hi"}, "unknown field 'prompt'"),
        (COMPLETIONS, {"messages": []}, "messages=[]: not supported"),
        (COMPLETIONS, {"top_logprobs": 2}, "top_logprobs=2: not supported"),
        (COMPLETIONS, {"logprobs": True}, "logprobs=True: Expected int"),
    ],
)
def test_fields_of_the_other_endpoint_are_refused(path, fields, message):
    with pytest.raises(ValidationError) as caught:
        read(path, **fields)
    assert message in str(caught.value)


def test_the_effort_of_reasoning_is_a_variable_of_the_template(tiny):
    plain = dataclasses.replace(SERVED, tokenizer=tiny)
    template = "{{ reasoning_effort }} {{ messages[0].content }}"
    served = dataclasses.replace(plain, chat_template=template)

    (prompt,) = read(CHAT, reasoning_effort="low").prompts(served)
    assert prompt["prompt"] == "low Hi"
    same = read(CHAT, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low"})
    assert same.prompts(served) == [prompt]
    other = read(CHAT, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    with pytest.raises(ValidationError, match="reasoning_effort='low': chat_template_kwargs says"):
        other.prompts(served)
    with pytest.raises(ValidationError, match="reasoning_effort='low': .* does not know it"):
        read(CHAT, reasoning_effort="low").prompts(plain)


def test_effort_none_turns_thinking_off_in_templates_with_a_switch(tiny):
    template = "{{ enable_thinking }}{{ documents }} {{ messages[0].content }}"
    served = dataclasses.replace(SERVED, tokenizer=tiny, chat_template=template)
    request = read(CHAT, reasoning_effort="none", documents=[{"text": "a"}])
    assert request.prompts(served)[0]["prompt"] == "False[{'text': 'a'}] Hi"
    for wrong in (
        {"reasoning_effort": "low"},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
    ):
        with pytest.raises(
            ValidationError, match=f"^reasoning_effort='{wrong['reasoning_effort']}"
        ):
            read(CHAT, **wrong).prompts(served)
    unread = dataclasses.replace(served, chat_template="{{ messages }}")
    with pytest.raises(ValidationError, match="documents=.* does not know it"):
        read(CHAT, documents=[{}]).prompts(unread)


def test_special_tokens_are_added_to_a_rendered_prompt_if_asked(tiny):
    served = dataclasses.replace(SERVED, tokenizer=tiny, chat_template="a")
    ids = [
        read(CHAT, add_special_tokens=asked).prompts(served)[0]["prompt_token_ids"]
        for asked in (None, False, True)
    ]
    plain = tiny.encode("a", add_special_tokens=False)
    assert ids == [plain, plain, tiny.encode("a")]


def test_a_text_between_two_others_needs_a_model_that_has_marks_for_it(tiny):
    fields = {"prompt": "a", "suffix": "b", "add_special_tokens": False}
    served = dataclasses.replace(SERVED, tokenizer=tiny)
    with pytest.raises(ValidationError, match="suffix='b': the model has no tokens"):
        read(COMPLETIONS, **fields).prompts(served)
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    hf = copy.deepcopy(tiny.hf)
    hf.add_tokens(marks, special_tokens=True)
    served = dataclasses.replace(SERVED, tokenizer=Tokenizer(hf))
    before, behind, gap = hf.convert_tokens_to_ids(marks)
    a, b = (hf.encode(text, add_special_tokens=False) for text in "ab")
    (prompt,) = read(COMPLETIONS, **fields).prompts(served)
    assert prompt["prompt_token_ids"] == [before, *a, behind, *b, gap]
    for name, value in {"prompt": [1], "echo": True, "truncate_prompt_tokens": 5}.items():
        with pytest.raises(ValidationError, match=f"^{name}="):
            read(COMPLETIONS, **fields | {name: value}).prompts(served)


@pytest.mark.parametrize("marks", _FAMILIES)
def test_every_family_of_marks_is_found_and_ordered(tiny, marks):
    tokens = [token for token in marks[:3] if token is not None]
    hf = copy.deepcopy(tiny.hf)
    hf.add_tokens(tokens, special_tokens=True)
    tokenizer = Tokenizer(hf)
    assert find_marks(tokenizer) == marks
    ids = fill_in(tokenizer, marks, "a", "b", PromptLength(99), add_special_tokens=False)
    first, second = marks.before + "a", marks.behind + "b"
    if marks.has_behind_first:
        first, second = second, first
    assert hf.decode(ids, skip_special_tokens=False) == first + second + (marks.gap or "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 0}, "best_of=0: it must be at least n=1"),
        ({"best_of": 2, "n": 3}, "best_of=2: it must be at least n=3"),
        ({"best_of": 2, "stream": True}, "best_of=2: a stream does not wait"),
        ({"best_of": 20_000}, "best_of=20000: it must be"),
        ({"best_of": 2, "temperature": 0}, "best_of=2: greedy"),
    ],
)
def test_the_best_of_several_answers(fields, message):
    assert read(COMPLETIONS, best_of=3, n=2).sampling_params(SERVED).n == 3
    assert read(COMPLETIONS, best_of=3).sampling_params(SERVED).logprobs == 0
    with pytest.raises(ValidationError) as caught:
        ENDPOINTS[COMPLETIONS].request.read(
            NEEDED[COMPLETIONS] | fields, live=True
        ).sampling_params(SERVED)
    assert str(caught.value).startswith(message)


def test_a_search_has_what_it_understands_and_nothing_else(path):
    def beams(**fields):
        kind = ENDPOINTS[path].request
        request = kind.read(NEEDED[path] | {"use_beam_search": True, "n": 3} | fields, live=True)
        return request.beam_search(request.sampling_params(SERVED), SERVED)

    found = beams(length_penalty=0.5, max_tokens=7, temperature=0, top_p=1, top_k=-1, stop=[])
    assert (found.beam_width, found.max_tokens, found.length_penalty) == (3, 7, 0.5)
    for field, value in {"top_p": 0.5, "seed": 1, "stop": ["a"], "min_tokens": 1}.items():
        with pytest.raises(ValidationError, match=f"^{field}=.*beam search takes"):
            beams(**{field: value})
    with pytest.raises(ValidationError, match="^n=300"):
        beams(n=300)
    with pytest.raises(ValidationError, match="length_penalty=2.0: it needs use_beam_search"):
        beams(use_beam_search=False, length_penalty=2)


def test_what_is_missing_is_named():
    with pytest.raises(ValidationError, match="missing required field `messages`") as caught:
        find_endpoint(CHAT).request.read({"model": "m"})
    assert caught.value.parameter == "messages"
    with pytest.raises(ValidationError, match="it must be a JSON object"):
        find_endpoint(CHAT).request.read(["messages"])


def test_other_paths_are_not_found():
    with pytest.raises(NotFoundError, match="url='/v1/embeddings' is not served here"):
        find_endpoint("/v1/embeddings")


def test_chat_may_fill_the_context_and_completions_make_16_tokens():
    assert read(CHAT).sampling_params(SERVED).max_tokens is None
    assert read(CHAT, max_completion_tokens=5).sampling_params(SERVED).max_tokens == 5
    assert read(CHAT, max_completion_tokens=5, max_tokens=5).sampling_params(SERVED)
    assert read(COMPLETIONS).sampling_params(SERVED).max_tokens == 16
    with pytest.raises(ValidationError, match="max_tokens=4 says otherwise; give one of them"):
        read(CHAT, max_completion_tokens=5, max_tokens=4).sampling_params(SERVED)


def test_no_answer_is_longer_than_the_model_recommends(path):
    bounded = dataclasses.replace(SERVED, max_new_tokens=12)
    lengths = [
        read(path, max_tokens=asked).sampling_params(bounded).max_tokens for asked in (None, 5, 20)
    ]
    assert lengths == [12, 5, 12]


def test_every_field_of_openai_is_known(path):
    openai = pytest.importorskip("openai")
    kinds = {CHAT: openai.types.chat, COMPLETIONS: openai.types}
    kind = kinds[path].completion_create_params.CompletionCreateParamsStreaming
    for name in typing.get_type_hints(kind):
        read(path, **{name: NEEDED[path].get(name)})  # null is neutral


def test_a_request_may_have_a_name_that_fits_everywhere(path):
    assert read(path, request_id="x" * 128).request_id == "x" * 128
    for wrong in ("", "x" * 129, "a b", "a\n", "ä"):
        with pytest.raises(ValidationError, match="request_id=.*printable ASCII"):
            read(path, request_id=wrong)


def test_top_logprobs_need_logprobs():
    with pytest.raises(ValidationError, match="top_logprobs=2: it needs logprobs=true"):
        read(CHAT, top_logprobs=2).sampling_params(SERVED)
    assert read(CHAT, logprobs=True).sampling_params(SERVED).logprobs == 0
    assert read(CHAT, logprobs=True, top_logprobs=2).sampling_params(SERVED).logprobs == 2
    assert read(CHAT, logprobs=False).sampling_params(SERVED).logprobs is None


def test_a_request_must_mean_this_model():
    SERVED.check_name("b")
    SERVED.check_name(None)
    with pytest.raises(NotFoundError, match="model='c' is not served here; the names are 'a', 'b'"):
        SERVED.check_name("c")


@pytest.mark.parametrize(
    ("error", "code", "kind", "message"),
    [
        (ValidationError("no", parameter="n"), 400, "BadRequestError", "no"),
        (NotFoundError("no", parameter="n"), 404, "NotFoundError", "no"),
        (AnswerError("no"), 500, "InternalServerError", "no"),
        (KeyError("/secret/path"), 500, "InternalServerError", "internal error; see the log"),
    ],
)
def test_errors_have_the_protocol_s_shape(error, code, kind, message):
    said = error_body(error).error
    assert (said.code, said.type, said.message) == (code, kind, message)
    assert said.param == getattr(error, "parameter", None)


def test_errors_tell_no_paths_and_no_novels():
    told = error_body(AnswerError("cannot read /srv/models/a.bin: see http://a/b")).error.message
    assert told == "cannot read <path>: see http://a/b"
    assert len(error_body(ValidationError("x" * 10_000)).error.message) == 2000


def test_what_only_a_server_has_is_read_for_it_alone(path):
    live = ENDPOINTS[path].request.read(NEEDED[path] | {"stream": True}, live=True)
    assert live.stream and live.sampling_params(SERVED).output_kind is RequestOutputKind.DELTA
    with pytest.raises(ValidationError, match="it needs stream=true"):
        ENDPOINTS[path].request.read(
            NEEDED[path] | {"stream_options": {"include_usage": True}}, live=True
        ).sampling_params(SERVED)
    with pytest.raises(ValidationError, match="unknown field"):
        ENDPOINTS[path].request.read(NEEDED[path] | {"stream_options": {"usage": True}}, live=True)
