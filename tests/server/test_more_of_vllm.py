"""What vLLM's users know beside the plain protocol: beams, echoes, the best of several, rendered
prompts, the tokenizer's configuration, and aborts by id."""

import json
import threading
import time

import pytest

from jaxllm.sampling_params import BeamSearchParams

pytestmark = pytest.mark.slow  # the first one starts an engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"role": "user", "content": "Hello"}


def asked(client, path, **body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(client, path, **body):
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"]


def chunks(client, path, **body):
    text = client.post(path, json=body | {"stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_beams_are_those_of_the_library(client, llm, host):
    body = {"prompt": ["Once", "The"], "use_beam_search": True, "n": 3, "max_tokens": 6}
    answer = asked(client, COMPLETIONS, **body, length_penalty=0.5, ignore_eos=True)
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5, ignore_eos=True)
    expected = [one.text for beams in llm.beam_search(["Once", "The"], params)
                for one in beams.sequences]  # fmt: skip
    assert [one["text"] for one in answer["choices"]] == expected
    assert [one["index"] for one in answer["choices"]] == list(range(6))
    assert answer["usage"]["completion_tokens"] == 36
    streamed = chunks(client, COMPLETIONS, **body, length_penalty=0.5, ignore_eos=True)
    assert sorted(one["choices"][0]["text"] for one in streamed) == sorted(expected)
    chat = asked(client, CHAT, messages=[HELLO], use_beam_search=True, n=2, max_tokens=4)
    assert len(chat["choices"]) == 2
    assert refused(client, COMPLETIONS, **body | {"n": 11}) == "n"  # needs 22 logprobs
    assert host.wait_until_idle().num_blocks_used == 0


def test_the_best_of_several_are_the_likeliest(client):
    body = {"prompt": "Once", "max_tokens": 5, "seed": 1, "ignore_eos": True}
    every = asked(client, COMPLETIONS, **body, n=4, logprobs=0)
    ranked = sorted(
        every["choices"], key=lambda one: sum(one["logprobs"]["token_logprobs"]), reverse=True
    )
    best = asked(client, COMPLETIONS, **body, n=2, best_of=4)
    assert [one["text"] for one in best["choices"]] == [one["text"] for one in ranked[:2]]
    assert [one["logprobs"] for one in best["choices"]] == [None, None]
    assert best["usage"]["completion_tokens"] == 20


def test_an_answer_repeats_the_message_that_it_goes_on_with(client):
    messages = [HELLO, {"role": "assistant", "content": "I am"}]
    begun = {"messages": messages, "max_tokens": 4, "temperature": 0}
    begun |= {"continue_final_message": True, "add_generation_prompt": False}
    plain = asked(client, CHAT, **begun)["choices"][0]["message"]["content"]
    echoed = asked(client, CHAT, **begun, echo=True)["choices"][0]["message"]["content"]
    assert echoed == "I am" + plain
    pieces = [one["choices"][0]["delta"].get("content", "")
              for one in chunks(client, CHAT, **begun, echo=True)]  # fmt: skip
    assert "".join(pieces) == echoed
    assert asked(client, CHAT, **begun | {"messages": [HELLO]}, echo=True)


def test_an_empty_prompt_begins_a_document(client, llm):
    (start,) = llm.llm_engine.tokenizer.start_of_document
    body = {"max_tokens": 5, "temperature": 0}
    texts = {
        asked(client, COMPLETIONS, prompt=prompt, **body)["choices"][0]["text"]
        for prompt in ("", None, [start])
    }
    assert len(texts) == 1
    assert refused(client, COMPLETIONS, prompt=[]) == "prompt"


def test_a_rendered_request_is_what_the_engine_gets(client):
    body = {"messages": [HELLO], "temperature": 0.5, "max_tokens": 3, "stop": "x"}
    rendered = asked(client, f"{CHAT}/render", **body)
    assert rendered["token_ids"] == asked(client, "/tokenize", messages=[HELLO])["tokens"]
    assert rendered["sampling_params"] == {"temperature": 0.5, "max_tokens": 3, "stop": ["x"]}
    usage = asked(client, CHAT, **body)["usage"]
    assert usage["prompt_tokens"] == len(rendered["token_ids"])
    several = asked(client, f"{COMPLETIONS}/render", prompt=["a", [5, 6]], cache_salt="s")
    assert [one["token_ids"] for one in several][1] == [5, 6]
    assert {one["cache_salt"] for one in several} == {"s"}
    assert refused(client, f"{COMPLETIONS}/render", prompt=["a", [100_000]]) == "prompt[1]"


def test_the_tokenizer_s_configuration_is_told_only_if_the_server_is_asked_to(host, client, llm):
    assert client.get("/tokenizer_info").status_code == 404
    with host.serve(enable_tokenizer_info_endpoint=True, access_log=False) as told:
        info = told.get("/tokenizer_info").json()
    hf = llm.llm_engine.tokenizer.hf
    assert info["chat_template"] == hf.chat_template
    assert info["eos_token"] == hf.eos_token
    assert not [value for value in info.values() if isinstance(value, str) and value[:1] == "/"]


@pytest.mark.parametrize("by", ["header", "body", "all"])
def test_requests_are_aborted_by_the_ids_that_clients_know(host, by):
    with host.serve(admin_without_key=True, access_log=False) as client:
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "n": 2}
        answers = []

        def ask(name):
            answers.append(client.post(COMPLETIONS, json=body, headers={"X-Request-Id": name}))

        thread = threading.Thread(target=ask, args=("mine",))
        thread.start()
        while not client.get("/load").json()["server_load"]:
            time.sleep(0.01)
        assert client.post("/abort_requests", json={"request_ids": ["other"]}).json() == {
            "num_aborted": 0
        }
        names = {"header": ["mine"], "body": ["cmpl-mine"], "all": None}[by]
        while not client.post("/abort_requests", json={"request_ids": names}).json()["num_aborted"]:
            time.sleep(0.01)
        thread.join(60)
        (answer,) = answers
        assert (answer.status_code, "aborted" in answer.text) == (500, True)
        assert refused(client, "/abort_requests", ids=[]) == "ids"
    host.wait_until_idle()
