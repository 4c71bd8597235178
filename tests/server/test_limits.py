"""Every limit refuses what is above it, with the field, the value and the limit, in few words."""

import json
import threading
import time

import pytest

from jaxllm.frontend import tokenizer
from jaxllm.messages import EngineInfo
from jaxllm.openai.errors import error_body
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.body import BodyLimits
from jaxllm.server.limits import check_logprobs
from jaxllm.server.options import ServerOptions

pytestmark = pytest.mark.slow  # the first one starts an engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
LONG = "x" * 100_000
JSON = {"Content-Type": "application/json"}


def tool(**more):
    return {"type": "function", "function": {"name": "look", **more}}


@pytest.mark.parametrize(
    ("path", "field", "value", "told"),
    [
        (CHAT, "messages", HELLO * 8193, "messages='8193 messages': at most 8192"),
        (CHAT, "tools", [tool()] * 129, "tools='129 tools': give 1 to 128"),
        (CHAT, "tools", [tool(description="x" * 2**20)], " bytes': at most 1048576"),
        (CHAT, "tools", [tool() | {"function": {"name": LONG}}], "a name has 1 to 64"),
        (CHAT, "top_logprobs", 21, "max_logprobs=20"),
        (COMPLETIONS, "prompt", ["a"] * 1025, "prompt='1025 prompts': at most 1024"),
        (COMPLETIONS, "n", 16385, "n=16385: it must be between 1 and 16384"),
        (COMPLETIONS, "stop", ["a"] * 65, "stop='65 entries': at most 64"),
        (COMPLETIONS, "stop", "a" * 1025, "stop='1025 characters': a stop string has at most 1024"),
        (COMPLETIONS, "stop_token_ids", list(range(129)), "'129 entries': at most 128"),
        (COMPLETIONS, "bad_words", ["a"] * 129, "bad_words='129 entries': at most 128"),
        (COMPLETIONS, "bad_words", [LONG], "'100000 characters': a bad word has at most 1024"),
        (COMPLETIONS, "bad_words", ["x y z " * 20], "between 1 and 16 are allowed"),
        (
            COMPLETIONS,
            "logit_bias",
            {str(token): 1 for token in range(1025)},
            "logit_bias='1025 entries': at most 1024",
        ),
        (COMPLETIONS, "allowed_token_ids", list(range(500)), "ids of this model are below"),
        (COMPLETIONS, "logprobs", 21, "logprobs=21: the engine gives at most max_logprobs=20"),
        (COMPLETIONS, "prompt_logprobs", 21, "prompt_logprobs=21"),
        (COMPLETIONS, "cache_salt", "a" * 129, "cache_salt="),
        (COMPLETIONS, "prompt", "x " * 9000, "max_model_len=2048"),
        # Long values are told by their beginning, whatever is wrong with them.
        (COMPLETIONS, "temperature", LONG, "temperature='xxx"),
        (COMPLETIONS, "model", LONG, "model='xxx"),
        (COMPLETIONS, LONG, 1, "unknown field 'xxx"),
        (COMPLETIONS, "logit_bias", {LONG: 1}, "logit_bias="),
        (COMPLETIONS, "seed", int("1" * 4000), "seed="),
        (CHAT, "messages", [{"role": "user", "content": [LONG, 1]}], "messages[0].content[1]=1: "),
        (CHAT, "messages", [LONG], "messages"),
        (CHAT, "chat_template_kwargs", {"tokenize": LONG}, "chat_template_kwargs="),
        ("/tokenize", "prompt", [LONG], "prompt="),
        ("/detokenize", "tokens", [10**9], "ids of this model are"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_above_a_limit(parsing_client, path, field, value, told):
    body = {CHAT: {"messages": HELLO, "logprobs": True}, COMPLETIONS: {"prompt": "a"}}
    response = parsing_client.post(path, json=body.get(path, {}) | {field: value})
    assert response.status_code in (400, 404), response.text[:200]
    message = response.json()["error"]["message"]
    assert told in message or field[:80] in message and len(field) > 1000, message
    assert len(response.text) < 2500 and "/" not in message.replace("and/or", ""), message


@pytest.fixture(scope="module")
def parsing_client(host):
    options = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with host.serve(access_log=False, **options) as client:
        yield client


def test_logprobs_count_at_all_positions(host):
    with host.serve(max_request_logprobs=1000) as client:
        body = {"prompt": [[5] * 10, [6] * 10], "n": 2, "logprobs": 4}
        response = client.post(COMPLETIONS, json=body | {"max_tokens": 51})
        assert response.status_code == 400
        assert (
            "logprobs='1020 at all positions': one request may have at most 1000" in response.text
        )
        assert client.post(COMPLETIONS, json=body | {"max_tokens": 50}).status_code == 200
        echo = {"prompt": [5] * 100, "prompt_logprobs": 9, "max_tokens": 1}
        assert client.post(COMPLETIONS, json=echo).status_code == 200
        assert client.post(COMPLETIONS, json=echo | {"prompt_logprobs": 10}).status_code == 400


@pytest.mark.parametrize(
    ("field", "value", "per_token"),
    [("echo", True, 1), ("return_token_ids", True, 1), ("prompt_logprobs", 3, 4)],
)
def test_a_prompt_counts_as_often_as_the_answer_shows_it(field, value, per_token, host):
    body = {"prompt": [5] * 50, "n": 4, "max_tokens": 1, field: value}
    num_shown = 4 * 50 * per_token
    for most, status in ((num_shown - 1, 400), (num_shown, 200)):
        with host.serve(max_request_logprobs=most) as client:
            response = client.post(COMPLETIONS, json=body)
            assert response.status_code == status, response.text
    with host.serve(max_request_logprobs=0) as client:
        del body[field]
        assert client.post(COMPLETIONS, json=body).status_code == 200


def test_all_of_the_vocabulary_counts_as_what_it_is():
    info = EngineInfo(
        model="m", model_dir="m", vocab_size=1000, max_model_len=100, max_logprobs=1000,
        eos_token_ids=[], max_num_seqs=1, max_num_batched_tokens=16, cache_groups=(), block_size=16,
    )  # fmt: skip
    params = SamplingParams(logprobs=-1, max_tokens=None)
    check_logprobs(params, [90], info, most=10 * 1001, num_shown=0)
    with pytest.raises(ValueError, match="logprobs='10010 at all positions'"):
        check_logprobs(params, [90], info, most=10 * 1001 - 1, num_shown=0)


def test_what_is_not_meant_for_users_is_not_told():
    for error in (OSError("/secret/path"), RuntimeError("x" * 10_000)):
        message = error_body(error).error.message
        assert "secret" not in message and len(message) < 100


def test_a_template_without_end_holds_up_nobody_who_brings_none(host):
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    found = []
    body = {"messages": HELLO, "max_tokens": 2}
    foreign = body | {"chat_template": "{{ 'a' }}"}
    with host.serve(trust_request_chat_template=True, chat_template_timeout=300.0) as client:
        assert client.post(CHAT, json=body).status_code == 200
        assert client.post(CHAT, json=foreign).status_code == 200  # that process is ready, too

        def ask():
            found.append(client.post(CHAT, json=body | {"chat_template": slow}))

        process = client.server._service.templates._foreign.process
        thread = threading.Thread(target=ask)
        thread.start()
        while not process._lock.locked():  # until it is at work
            time.sleep(0.01)
        # Chat with and without switches, completions, and what else needs the tokenizer.
        assert client.post(CHAT, json=body).status_code == 200
        switched = body | {"chat_template_kwargs": {"enable_thinking": False}}
        assert client.post(CHAT, json=switched).status_code == 200
        assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200
        assert client.post("/tokenize", json={"messages": HELLO}).status_code == 200
        assert not found
        process._process.kill()
        thread.join()
        assert found[0].status_code == 400 and "it has ended its process" in found[0].text
    with host.serve(trust_request_chat_template=True, chat_template_timeout=3.0) as client:
        late = client.post(CHAT, json=body | {"chat_template": slow})
        assert late.status_code == 400 and "chat_template_timeout=3.0" in late.text
        assert client.post(CHAT, json=foreign).status_code == 200
        response = client.post(CHAT, json=body | {"chat_template": "x" * 300_000})
        assert response.status_code == 400 and "'300000 characters'" in response.text


def test_a_stream_without_news_is_kept_alive(host):
    body = {"prompt": "a", "max_tokens": 3, "stream": True, "temperature": 0}
    with host.serve(sse_keep_alive_interval=0.05) as client:
        whole = client.post(COMPLETIONS, json=body | {"stream": False}).json()
        host.call(host.engine.sleep(0))
        with client.stream("POST", COMPLETIONS, json=body) as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert [next(lines) for _ in range(3)] == [": keep-alive"] * 3
            host.call(host.engine.wake_up())
            *events, last = [line for line in lines if line != ": keep-alive"]
        texts = [json.loads(one.removeprefix("data: "))["choices"][0]["text"] for one in events]
        assert last == "data: [DONE]" and "".join(texts) == whole["choices"][0]["text"]
    with host.serve() as client:
        assert "keep-alive" not in client.post(COMPLETIONS, json=body).text


@pytest.fixture
def num_chars(monkeypatch):
    """Of each text that is tokenized."""
    found, encode = [], tokenizer._encode

    def counted(hf, text, add_special_tokens):
        found.append(len(text))
        return encode(hf, text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encode", counted)
    return found


TOO_LONG = "word " * 600_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": TOO_LONG}),
        (COMPLETIONS, {"prompt": ["a", TOO_LONG], "add_special_tokens": False}),
        (COMPLETIONS, {"prompt": [5] * 100_000}),
        (CHAT, {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/tokenize", {"prompt": TOO_LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/detokenize", {"tokens": [5] * 100_000}),
    ],
)
def test_what_cannot_fit_is_refused_and_hardly_tokenized(path, body, client, num_chars):
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    told = "maximum context length" if path in (CHAT, COMPLETIONS) else "at most 65536 tokens"
    assert told in response.json()["error"]["message"]
    assert sum(num_chars) < 400_000


def test_what_does_not_fit_is_cut_if_a_request_asks_for_it(client, num_chars):
    for path, field, value in (
        (COMPLETIONS, "prompt", TOO_LONG),
        (CHAT, "messages", [{"role": "user", "content": TOO_LONG}]),
    ):
        body = {field: value, "truncate_prompt_tokens": 5, "max_tokens": 1}
        response = client.post(path, json=body)
        assert response.json()["usage"]["prompt_tokens"] == 5, response.text
    assert sum(num_chars) < 400_000


def test_what_tokenize_takes_is_an_option(host):
    with host.serve(max_tokenize_tokens=10) as client:
        assert client.post("/tokenize", json={"prompt": "a" * 10}).json()["count"] == 10
        for path, body in (
            ("/tokenize", {"prompt": "a" * 11}),
            ("/detokenize", {"tokens": [5] * 11}),
        ):
            response = client.post(path, json=body)
            assert response.status_code == 400 and "'11 tokens'" in response.text
            assert "--max-tokenize-tokens" in response.text


def test_the_longest_body_follows_the_longest_prompt(host):
    limits = BodyLimits.of(ServerOptions(), 1 << 20)
    assert limits.max_bytes == (4 << 20) + (64 << 20)
    assert BodyLimits.of(ServerOptions(max_body_bytes=7), 1 << 20).max_bytes == 7
    with host.serve() as client:  # of a model whose prompts have 2047 tokens
        longest = (4 << 20) + 64 * 2048
        response = client.post(COMPLETIONS, content=b" " * (longest + 1), headers=JSON)
        assert response.status_code == 413 and f"{longest} bytes" in response.text
        escaped = b'{"prompt": "%b", "max_tokens": 1}' % (b"\\u00e9" * 1000)
        assert client.post(COMPLETIONS, content=escaped, headers=JSON).status_code == 200
