"""Requests of the protocol, answered by a real engine: what is asked for is in the answer."""

import itertools
import json

import msgspec
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.messages import FinishReason
from jaxllm.openai.endpoints import find_endpoint
from jaxllm.openai.errors import AnswerError
from jaxllm.openai.served_model import ServedModel
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

pytestmark = pytest.mark.slow  # the first one compiles

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return LLM(make_tiny_checkpoint(tmp_path_factory.mktemp("openai") / "model"), **TINY)


@pytest.fixture(scope="module")
def served(llm) -> ServedModel:
    return ServedModel.of(llm.llm_engine, ("tiny", "alias"))


@pytest.fixture(scope="module")
def ask(llm, served):
    """The body of the answer to a body, as JSON has it."""
    ids = map(str, itertools.count())

    def ask(path: str, **body):
        endpoint = find_endpoint(path)
        request = endpoint.request.read(json.loads(json.dumps(body)))
        served.check_name(request.model)
        params = request.sampling_params(served)
        outputs = llm.generate(
            request.prompts(served),
            params,
            use_tqdm=False,
            tokenization_kwargs=_truncation(request.truncate_prompt_tokens),
        )
        answer = endpoint.answer(request, next(ids), 1234, outputs, served)
        return json.loads(msgspec.json.encode(answer))

    return ask


def _truncation(tokens):
    return None if tokens is None else {"truncate_prompt_tokens": tokens}


@pytest.fixture(scope="module")
def chat(ask):
    return lambda **body: ask("/v1/chat/completions", **body)


@pytest.fixture(scope="module")
def complete(ask):
    return lambda **body: ask("/v1/completions", **body)


def test_chat_is_the_library_s_chat(llm, chat):
    answer = chat(model="alias", messages=HELLO, request_id="mine", **GREEDY)
    (output,) = llm.chat(HELLO, SamplingParams(**GREEDY), use_tqdm=False)
    assert answer["object"] == "chat.completion"
    assert (answer["id"], answer["created"], answer["model"]) == ("chatcmpl-mine", 1234, "tiny")
    (choice,) = answer["choices"]
    expected = {"role": "assistant", "content": output.outputs[0].text, "refusal": None}
    assert choice["message"] == expected
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(output.prompt_token_ids)
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4


def test_chat_goes_on_with_the_last_message(llm, chat):
    messages = [*HELLO, {"role": "assistant", "content": "Well"}]
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    answer = chat(messages=messages, return_token_ids=True, **flags, **GREEDY)
    (output,) = llm.chat(messages, SamplingParams(**GREEDY), use_tqdm=False, **flags)
    assert answer["prompt_token_ids"] == output.prompt_token_ids
    assert answer["choices"][0]["token_ids"] == output.outputs[0].token_ids


def test_chat_without_a_bound_fills_the_context(chat):
    answer = chat(messages=HELLO, temperature=0, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == TINY["max_model_len"]


def test_no_answer_is_longer_than_the_model_recommends(tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model")
    (model / "generation_config.json").write_text('{"max_new_tokens": 3, "eos_token_id": 0}')
    info = LLM(model, **TINY).llm_engine.info
    assert info.max_new_tokens == info.default_sampling_params.max_tokens == 3


def test_equal_engines_have_equal_fingerprints(llm, served, chat):
    answer = chat(messages=HELLO, **GREEDY)
    assert answer["system_fingerprint"] == served.fingerprint
    assert ServedModel.of(llm.llm_engine, ("other",)).fingerprint == served.fingerprint


def test_chat_logprobs_are_the_likeliest_in_order(chat):
    answer = chat(messages=HELLO, logprobs=True, top_logprobs=3, seed=1, max_tokens=4, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert len(content) == 4
        for token in content:
            top = [one["logprob"] for one in token["top_logprobs"]]
            assert len(top) == 3
            assert top == sorted(top, reverse=True)
            assert top[0] >= token["logprob"]
            is_part = "\ufffd" in token["token"]  # of a character
            assert is_part or token["bytes"] == list(token["token"].encode())
    plain = chat(messages=HELLO, logprobs=True, **GREEDY)["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in plain] == [[]] * 4


def test_bytes_are_those_of_the_token_where_it_is_a_part_of_a_character(llm, chat):
    parts = llm.llm_engine.tokenizer.encode("\N{GRINNING FACE}", add_special_tokens=False)
    assert len(parts) > 1
    answer = chat(messages=HELLO, logprobs=True, allowed_token_ids=parts[:1], max_tokens=2)
    for token in answer["choices"][0]["logprobs"]["content"]:
        assert token["token"] == "\N{REPLACEMENT CHARACTER}"
        assert "\N{GRINNING FACE}".encode().startswith(bytes(token["bytes"]))


def test_completions_are_ordered_by_prompt(llm, complete):
    prompts = ["Hello, how", [70, 71, 72], "One"]
    answer = complete(prompt=prompts, n=2, seed=3, max_tokens=3, return_token_ids=True)
    assert answer["id"].startswith("cmpl-")
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    params = SamplingParams(n=2, seed=3, max_tokens=3)
    expected = [
        (output.prompt_token_ids, one.token_ids, one.text)
        for prompt in prompts
        for output in llm.generate(prompt, params, use_tqdm=False)
        for one in output.outputs
    ]
    assert [
        (choice["prompt_token_ids"], choice["token_ids"], choice["text"])
        for choice in answer["choices"]
    ] == expected
    # A prompt counts once.
    once = sum(len(ids) for ids, _, _ in expected[::2])
    assert answer["usage"]["prompt_tokens"] == once
    assert answer["usage"]["completion_tokens"] == 18


def test_echo_puts_the_prompt_with_its_logprobs_first(complete):
    plain = complete(prompt="Hello, how", logprobs=2, **GREEDY)["choices"][0]
    echo = complete(prompt="Hello, how", logprobs=2, echo=True, **GREEDY)["choices"][0]
    assert echo["text"] == "Hello, how" + plain["text"]
    ours = plain["logprobs"]
    assert len(ours["tokens"]) == 4
    assert all(2 <= len(top) <= 3 for top in ours["top_logprobs"])
    all_of_it = echo["logprobs"]
    assert all_of_it["tokens"][-4:] == ours["tokens"]
    assert "".join(all_of_it["tokens"][:-4]) == "Hello, how"
    assert all_of_it["token_logprobs"][0] is None
    assert all_of_it["top_logprobs"][0] is None
    assert all_of_it["token_logprobs"][-4:] == pytest.approx(ours["token_logprobs"], abs=1e-4)
    assert all(logprob < 0 for logprob in all_of_it["token_logprobs"][1:])
    assert all_of_it["text_offset"][:3] == [0, 2, 4]  # He|ll|o


def test_a_mere_echo_scores_the_prompt(complete):
    answer = complete(prompt=[72, 73, 74], echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert len(choice["logprobs"]["tokens"]) == 3
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    by_echo = choice["logprobs"]["token_logprobs"]
    asked = complete(prompt=[72, 73, 74], prompt_logprobs=0, max_tokens=1)["choices"][0]
    by_asking = [
        position["logprob"] for d in asked["prompt_logprobs"][1:] for position in d.values()
    ]
    assert by_echo[1:] == pytest.approx(by_asking, abs=1e-4)


def test_tokens_are_shown_as_ids_if_asked(complete):
    answer = complete(prompt="One", logprobs=0, return_tokens_as_token_ids=True,
                      return_token_ids=True, **GREEDY)  # fmt: skip
    (choice,) = answer["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in choice["token_ids"]]


def test_a_prompt_is_cut_to_its_end_if_asked(complete):
    whole = complete(prompt="Hello, how are you", return_token_ids=True, **GREEDY)
    cut = complete(prompt="Hello, how are you", truncate_prompt_tokens=2, echo=True,
                   return_token_ids=True, **GREEDY)  # fmt: skip
    last = whole["choices"][0]["prompt_token_ids"][-2:]
    assert cut["choices"][0]["prompt_token_ids"] == last
    assert not cut["choices"][0]["text"].startswith("Hello")


def test_a_stop_string_is_told(complete):
    text = complete(prompt="One", **GREEDY)["choices"][0]["text"]
    answer = complete(prompt="One", stop=text[-1], **GREEDY)["choices"][0]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", text[-1])
    assert text[-1] not in answer["text"]


def test_a_failed_answer_is_an_error(llm, served):
    (output,) = llm.generate("One", SamplingParams(max_tokens=1), use_tqdm=False)
    output.outputs[0].finish_reason = str(FinishReason.ERROR)
    output.outputs[0].stop_reason = "out of order"
    endpoint = find_endpoint("/v1/completions")
    request = endpoint.request.read({"prompt": "One"})
    with pytest.raises(AnswerError, match="could not finish the answer: out of order"):
        endpoint.answer(request, "1", 0, [output], served)


def test_blocks_of_several_prompts_have_an_address_if_they_have_one_place(llm, served):
    endpoint = find_endpoint("/v1/completions")
    request = endpoint.request.read({"model": "tiny", "prompt": [[5], [6]], "max_tokens": 1})
    outputs = llm.generate(request.prompts(served), request.sampling_params(served), use_tqdm=False)

    def told(*ports):
        for output, port in zip(outputs, ports, strict=True):
            output.kv_transfer_params = port and {"remote_port": port}
        return endpoint.answer(request, "1", 1234, outputs, served).kv_transfer_params

    assert told(7, 7) == {"remote_port": 7}
    assert told(7, 8) is None and told(None, None) is None
