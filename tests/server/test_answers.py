"""Over HTTP, at once or in a stream, the answers are those of LLM."""

import collections
import json

import pytest

from jaxllm import SamplingParams

pytestmark = pytest.mark.slow  # the first one starts an engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
PROMPTS = ["Once upon a time", "The answer"]


def events(client, path, **body):
    """What a stream says, without its end."""
    response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, done, nothing = response.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in found]


def post(client, path, **body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def added_up(chunks, text_of):
    """Of each choice: text, reason to end."""
    texts, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + text_of(choice)
            if choice["finish_reason"] is not None:
                assert index not in reasons
                reasons[index] = choice["finish_reason"]
    return [(texts[index], reasons[index]) for index in sorted(texts)]


BODIES = [
    {"temperature": 0, "max_tokens": 12},
    {"seed": 1, "n": 3, "max_tokens": 9},
    {"seed": 2, "max_tokens": 40, "stop": ["e", "a"]},
    {"seed": 3, "max_tokens": 6, "top_k": 5, "ignore_eos": True},
]


@pytest.mark.parametrize("body", BODIES)
def test_chat_is_llm_chat(client, llm, body):
    (expected,) = llm.chat(HELLO, SamplingParams(**body), use_tqdm=False)
    wanted = [(one.text, one.finish_reason) for one in expected.outputs]
    answer = post(client, CHAT, model="tiny", messages=HELLO, **body)
    found = [(c["message"]["content"], c["finish_reason"]) for c in answer["choices"]]
    assert found == wanted
    chunks = events(client, CHAT, messages=HELLO, **body)
    assert added_up(chunks, lambda choice: choice["delta"].get("content", "")) == wanted
    first = chunks[0]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in chunks[0]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", ["text", "ids"])
def test_completions_are_llm_generate(client, llm, body, kind):
    prompts = PROMPTS if kind == "text" else [[5, 6, 7], [8, 9]]
    given = prompts if kind == "text" else [{"prompt_token_ids": ids} for ids in prompts]
    expected = llm.generate(given, SamplingParams(**body), use_tqdm=False)
    wanted = [(one.text, one.finish_reason) for output in expected for one in output.outputs]
    answer = post(client, COMPLETIONS, prompt=prompts, **body)
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == wanted
    chunks = events(client, COMPLETIONS, prompt=prompts, **body)
    assert added_up(chunks, lambda choice: choice["text"]) == wanted
    single = post(client, COMPLETIONS, prompt=prompts[0], **body)
    assert [c["text"] for c in single["choices"]] == [text for text, _ in wanted][
        : len(wanted) // 2
    ]


@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_of_a_streamed_completion_are_those_of_the_whole(client, echo):
    body = {"prompt": PROMPTS, "max_tokens": 7, "temperature": 0, "logprobs": 2, "echo": echo}
    whole = post(client, COMPLETIONS, **body)
    chunks = events(client, COMPLETIONS, **body)
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert parts  # how many depends on how soon they were asked for
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "text_offset"):
            found = [one for part in parts for one in part["logprobs"][name]]
            assert found == choice["logprobs"][name]
        found = [one for part in parts for one in part["logprobs"]["token_logprobs"]]
        assert found == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)


def test_logprobs_of_a_streamed_chat_are_those_of_the_whole(client):
    body = {
        "messages": HELLO, "max_tokens": 7, "temperature": 0, "logprobs": True, "top_logprobs": 2,
        "return_token_ids": True,
    }  # fmt: skip
    (whole,) = post(client, CHAT, **body)["choices"]
    parts = [chunk["choices"][0] for chunk in events(client, CHAT, **body)]
    tokens = [one["token"] for part in parts for one in (part["logprobs"] or {}).get("content", [])]
    assert tokens == [one["token"] for one in whole["logprobs"]["content"]]
    assert [i for part in parts for i in part.get("token_ids", [])] == whole["token_ids"]


@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {})])
def test_usage_is_told_in_a_last_chunk_and_on_the_way(client, path, asked):
    body = {"max_tokens": 5, "ignore_eos": True, "n": 2, "seed": 1}
    body |= asked or {"prompt": PROMPTS}
    wanted = post(client, path, **body)["usage"]
    del wanted["prompt_tokens_details"]  # the second time the prompts are in the cache
    chunks = events(client, path, stream_options={"include_usage": True}, **body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"].items() >= wanted.items()
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    chunks = events(client, path, stream_options={"continuous_usage_stats": True}, **body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == wanted["completion_tokens"]


def test_a_request_is_processed_in_one_go_and_each_prompt_once(host, client, monkeypatch):
    engine, counts = host.engine, collections.Counter()
    for owner, name in (
        (engine, "in_tokenizer_thread"),
        (engine, "process_input"),
        (engine.tokenizer, "encode_at_most"),
    ):
        original = getattr(owner, name)

        def counted(*args, _name=name, _original=original, **more):
            counts[_name] += 1
            return _original(*args, **more)

        monkeypatch.setattr(owner, name, counted)
    post(client, COMPLETIONS, prompt=["a", "b", "c"], max_tokens=1)
    assert counts == {"in_tokenizer_thread": 1, "process_input": 3, "encode_at_most": 3}


def test_an_echo_alone_is_the_prompt(client):
    body = {"prompt": "Once", "max_tokens": 0, "echo": True}
    assert post(client, COMPLETIONS, **body)["choices"][0]["text"] == "Once"
    chunks = events(client, COMPLETIONS, stream_options={"include_usage": True}, **body)
    assert added_up(chunks, lambda choice: choice["text"]) == [("Once", "length")]
    assert chunks[-1]["usage"]["completion_tokens"] == 0


def test_tokens_there_and_back(client, llm):
    text = "Once upon a time"
    found = post(client, "/tokenize", prompt=text, return_token_strs=True)
    assert found["tokens"] == llm.get_tokenizer().encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 2048)
    assert len(found["token_strs"]) == found["count"]
    assert post(client, "/detokenize", tokens=found["tokens"]) == {"prompt": text}
    of_chat = post(client, "/tokenize", messages=HELLO)["tokens"]
    (expected,) = llm.chat(HELLO, SamplingParams(max_tokens=1), use_tqdm=False)
    assert of_chat == expected.prompt_token_ids


def test_no_answer_is_longer_than_the_model_recommends(host):
    with host.serve(max_new_tokens=3, access_log=False) as client:
        for path, asked in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"})):
            for more in ({}, {"max_tokens": 9}):
                answer = post(client, path, **asked, **more, ignore_eos=True)
                assert answer["usage"]["completion_tokens"] == 3


def test_what_the_server_says_of_itself(client, engine_options):
    models = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tiny", "alias"]
    assert {model["root"] for model in models} == {engine_options["model"]}
    assert client.get("/v1/models/alias").json()["max_model_len"] == 2048
    assert "version" in client.get("/version").json()
    for path in ("/health", "/ready", "/ping"):
        assert client.get(path).status_code == 200
    assert client.post("/ping").status_code == 200


def test_reasoning_is_told_apart(host, llm):
    # This form begins inside of the reasoning, and noise does not end it.
    params = SamplingParams(temperature=0, max_tokens=8, skip_special_tokens=False)
    (expected,) = llm.chat(HELLO, params, use_tqdm=False)
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 8}
    with host.serve(reasoning_parser="deepseek_r1") as client:
        (choice,) = post(client, CHAT, **body)["choices"]
        deltas = [chunk["choices"][0]["delta"] for chunk in events(client, CHAT, **body)]
        hidden = post(client, CHAT, include_reasoning=False, **body)["choices"][0]["message"]
    assert choice["message"]["reasoning"].strip() == expected.outputs[0].text.strip()
    assert choice["message"]["content"] == ""
    assert "".join(delta.get("reasoning", "") for delta in deltas) == choice["message"]["reasoning"]
    assert "reasoning" not in hidden


def test_the_official_client_understands_us(client):
    openai = pytest.importorskip("openai")
    theirs = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in theirs.models.list()] == ["tiny", "alias"]
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0}
    whole = theirs.chat.completions.create(**body)
    parts = list(
        theirs.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert parts[-1].usage.total_tokens == whole.usage.total_tokens
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        theirs.completions.create(model="no-such-model", prompt="Hi")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        theirs.completions.create(model="tiny", prompt="Hi", temperature=-1)
