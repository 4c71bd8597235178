"""What the server refuses, with which status, and that it is well afterwards."""

import asyncio
import socket
import ssl
import subprocess
import threading
import time

import httpx
import jsonschema
import pytest

from jaxllm import ValidationError
from jaxllm.server.answers import _Alarm
from jaxllm.server.auth import read_keys
from jaxllm.server.http_protocol import KEEP_IDLE_S
from jaxllm.server.options import ServerOptions

pytestmark = pytest.mark.slow  # the first one starts an engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (CHAT, {"messages": HELLO, "temprature": 1}, 400, "'temprature'; did you mean 'temperat"),
        (CHAT, {"messages": HELLO, "model": "gpt"}, 404, "model='gpt' is not served here"),
        (CHAT, {"messages": []}, 400, "messages is empty"),
        (CHAT, {"messages": HELLO, "chat_template": "{{ 1 }}"}, 400, "--trust-request-chat-templ"),
        (CHAT, {"messages": HELLO, "tools": TOOLS}, 400, "--enable-auto-tool-choice"),
        (CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": "any"}, 400, "tool_choice="),
        (CHAT, {"messages": HELLO, "stream_options": {}}, 400, "it needs stream=true"),
        (CHAT, {"messages": HELLO, "stream": True, "n": 0}, 400, "n=0"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, 400, "tokenize"),
        (COMPLETIONS, {"prompt": "x" * 9000, "max_tokens": 1}, 400, "max_model_len=2048"),
        (COMPLETIONS, {"prompt": "x" * 9000}, 400, "shorten it, have it cut by truncate_prompt_t"),
        (COMPLETIONS, {"prompt": [[100_000], [1]], "stream": True}, 400, "no such token"),
        (COMPLETIONS, {"prompt": ["a"] * 1025}, 400, "at most 1024"),
        (COMPLETIONS, {"prompt": ["a"] * 1024, "n": 16384}, 400, "one request may have at most"),
        (COMPLETIONS, {"prompt": {}}, 400, "it must be a string"),
        (COMPLETIONS, {}, 400, "prompt"),
        ("/tokenize", {"prompt": 1}, 400, "prompt=1"),
        ("/detokenize", {"tokens": [-1]}, 400, "ids of this model are 0 to"),
        ("/detokenize", {"token": [1]}, 400, "did you mean 'tokens'"),
        ("/v1/nothing", {}, 404, "there is no '/v1/nothing'"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(client, path, body, status, message):
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status)
    assert message in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert len(error["message"]) < 2100


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HELLO, "vllm_xargs": {"a": 1}}, "vllm_xargs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 999}, "top_logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        (CHAT, {"messages": [*HELLO, {"role": "user", "content": 3}]}, "messages[1].content"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 999}, "logprobs"),
        (COMPLETIONS, {"prompt": [[1], [100_000]], "stream": True}, "prompt[1]"),
        (COMPLETIONS, {"prompt": ["a", "x" * 9000]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": ["a", 3]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [1, 100_000]}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "vllm_xargs": {"a": 1}, "stream": True}, "vllm_xargs"),
    ],
)
def test_an_error_names_the_field_that_was_sent(client, path, body, param):
    error = client.post(path, json=body).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("path", "body", "is_valid"),
    [
        (CHAT, {"messages": HELLO, "tool_choice": "auto"}, True),
        ("/tokenize", {"messages": HELLO, "tool_choice": "auto"}, True),
        (COMPLETIONS, {"prompt": ""}, True),  # the beginning of a document
        (COMPLETIONS, {"prompt": None}, True),
        (COMPLETIONS, {"prompt": ["a", ""]}, True),
        (COMPLETIONS, {"prompt": "a", "temperature": 5.5}, True),
        (COMPLETIONS, {"prompt": "a", "temperature": 1001}, False),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, True),
        (COMPLETIONS, {"prompt": [1, 100_000]}, False),
        (COMPLETIONS, {"prompt": "a", "logprobs": 20}, True),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, False),
        (COMPLETIONS, {"prompt": "a", "logprobs": -1}, False),  # the vocabulary has more
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, False),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 2049}, False),
        (COMPLETIONS, {"prompt": "a", "priority": 1}, False),
        (COMPLETIONS, {"prompt": "a", "priority": 0}, True),
        ("/detokenize", {"tokens": [100_000]}, False),
        ("/detokenize", {"tokens": [1]}, True),
    ],
)
def test_what_the_description_calls_valid_is_accepted_and_nothing_else(
    client, path, body, is_valid
):
    document = client.get("/openapi.json").json()
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator(schema | {"components": document["components"]})
    assert validator.is_valid(body) is is_valid
    status = client.post(path, json=body | {"max_tokens": 1} if "v1" in path else body).status_code
    assert status == (200 if is_valid else 400)


def test_a_refusal_is_no_failure_in_the_log(client, caplog):
    response = client.get("/v1/models/none")
    assert response.status_code == 404 and "X-Request-Id" in response.headers
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_no_path_leads_to_a_host_that_the_request_names(host):
    with host.serve(allowed_hosts=("evil.example",), access_log=False) as client:
        for path in ("/health/", "/v1/chat/completions/"):
            response = client.get(path, headers={"Host": "evil.example"})
            assert response.status_code == 404


def test_a_conversation_is_tokenized_by_what_its_prompt_is_made_of(client):
    response = client.post("/tokenize", json={"messages": HELLO, "temperature": 1})
    assert response.status_code == 400 and "temperature" in response.text


def test_a_template_of_a_request_is_run_in_a_sandbox_and_only_if_trusted(host):
    body = {"messages": HELLO, "add_generation_prompt": False}
    with host.serve(trust_request_chat_template=True) as client:
        response = client.post(
            "/tokenize", json=body | {"chat_template": "a{{ messages | length }}"}
        )
        tokens = response.json()["tokens"]
        assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "a1"}
        for template in (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.clear() }}",
        ):
            response = client.post(CHAT, json=body | {"chat_template": template})
            assert response.status_code == 400 and "the chat template" in response.text


def test_a_body_that_is_no_json(client):
    for body, message in ((b"{", "(byte 1)"), (b"\xff", "(byte 0)"), (b"[]", "a JSON object")):
        response = client.post(CHAT, content=body, headers=JSON)
        assert response.status_code == 400 and message in response.text
    for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
        response = client.post(CHAT, content=b"{}", headers={"Content-Type": kind})
        assert response.status_code == 415
    assert client.get(CHAT).status_code == 405


def test_a_body_may_be_no_deeper_and_no_longer(host):
    with host.serve(max_json_depth=4, max_body_bytes=2000) as client:
        for depth, status in ((4, 404), (5, 400), (900, 400)):
            deep = b'{"model": "gpt", "messages": [], "chat_template_kwargs": {"a": %b%b}}'
            body = deep % (b"[" * (depth - 2), b"]" * (depth - 2))
            response = client.post(CHAT, content=body, headers=JSON)
            assert response.status_code == status, response.text
        # Said in the head, and found out while reading.
        for content in (b" " * 2001, iter([b" " * 1000] * 3)):
            response = client.post(CHAT, content=content, headers=JSON)
            assert response.status_code == 413 and "2000 bytes" in response.text
        assert client.post(CHAT, content=b" " * 2000, headers=JSON).status_code == 400


def test_recursion_ends_no_server(client):
    for body in (b"[" * 100_000, b'{"a":' * 100_000):
        assert client.post(CHAT, content=body, headers=JSON).status_code == 400


def test_a_key_opens_everything_and_nothing_else_does(host):
    with host.serve(keys=("first", "second")) as client:
        for path in ("/health", "/ready", "/ping"):
            assert client.get(path).status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer third"},
            {"Authorization": "Bearer"},
            {"Authorization": "first"},
            {"Authorization": "Basic first"},
            [("Authorization", "Bearer third"), ("Authorization", "Bearer first")],
        ):
            for path in ("/v1/models", "/metrics", "/version", "/nothing", "/health/", "//health"):
                # As a whole: of a relative "//health" the client would make a host.
                response = client.get(f"http://127.0.0.1:{client.port}{path}", headers=headers)
                assert response.request.url.path == path
                assert response.status_code == 401
                assert response.json()["error"]["type"] == "AuthenticationError"
                assert response.headers["WWW-Authenticate"] == "Bearer"
            for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
                assert client.post(path, json={}, headers=headers).status_code == 401
        for key in ("first", "second"):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.get("/v1/models", headers=headers).status_code == 200


def test_keys_come_of_flags_and_of_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("b\n\n c \n")
    options = ServerOptions(api_key=("a",), api_key_file=str(file))
    assert read_keys(options).api == ("a", "b", "c")
    file.write_text("\n")
    with pytest.raises(ValidationError, match="it has no keys"):
        read_keys(options)
    with pytest.raises(ValidationError, match="printable ASCII"):
        ServerOptions(api_key=("",)).validate()


def test_pages_of_other_origins_are_let_in_only_by_name(host, client):
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    allowed = "access-control-allow-origin"
    assert allowed not in client.options(CHAT, headers=asks).headers
    assert allowed not in client.get("/v1/models", headers=asks).headers
    with host.serve(allowed_origins=("https://a.example",), keys=("k",)) as other:
        assert other.options(CHAT, headers=asks).headers[allowed] == "https://a.example"
        asks["Origin"] = "https://b.example"
        assert other.options(CHAT, headers=asks).status_code == 400
        assert allowed not in other.get("/v1/models", headers=asks).headers


def test_too_many_answers_are_put_off(host):
    long = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}
    with host.serve(max_queued_requests=0) as client:  # as many as run at once: 4
        with client.stream("POST", COMPLETIONS, json=long | {"stream": True, "n": 3}) as stream:
            lines = stream.iter_lines()  # kept: who drops it hangs up
            next(lines)
            response = client.post(COMPLETIONS, json={"prompt": ["a", "b"], "max_tokens": 1})
            assert response.status_code == 503
            assert response.headers["Retry-After"] == "1"
            assert response.json()["error"]["type"] == "ServiceUnavailableError"
            assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200
        response = client.post(COMPLETIONS, json={"prompt": "a", "n": 5})
        assert response.status_code == 400 and "--max-queued-requests" in response.text
        host.wait_until_idle()
        assert client.post(COMPLETIONS, json={"prompt": "a", "n": 4}).status_code == 200


def test_too_many_tokens_are_put_off(host):
    long = {"prompt": [5] * 60, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with host.serve(max_queued_tokens=100) as client:
        with client.stream("POST", COMPLETIONS, json=long) as stream:
            lines = stream.iter_lines()  # kept: who drops it hangs up
            next(lines)
            response = client.post(COMPLETIONS, json={"prompt": [5] * 60})
            assert response.status_code == 503 and "--max-queued-tokens" in response.text
            assert client.post(COMPLETIONS, json={"prompt": [5] * 40}).status_code == 200
        assert client.post(COMPLETIONS, json={"prompt": [5] * 101}).status_code == 400


def test_too_many_bytes_are_put_off(host):
    with host.serve(max_queued_bytes=5000) as client:
        for _ in range(3):  # what was refused is not counted any more
            response = client.post("/tokenize", json={"prompt": "a" * 5000})
            assert response.status_code == 503 and "--max-queued-bytes" in response.text
        assert client.post("/tokenize", json={"prompt": "a" * 4900}).status_code == 200


@pytest.fixture
def alarm_amid_answers(host, monkeypatch):
    """The time of a request is over only when there is something of its answer."""
    ring = _Alarm._ring

    async def ring_late(self, engine, request_ids, deadline):
        before = (await engine.stats()).num_generation_tokens
        while (await engine.stats()).num_generation_tokens < before + 40:
            await asyncio.sleep(0.01)
        await ring(self, engine, request_ids, deadline)

    host.wait_until_idle()
    monkeypatch.setattr(_Alarm, "_ring", ring_late)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_an_answer_that_takes_too_long_ends_as_it_is(host, alarm_amid_answers, prompt):
    body = {"prompt": prompt, "max_tokens": 2000, "ignore_eos": True}
    with host.serve(request_timeout=0.3) as client:
        choices = client.post(COMPLETIONS, json=body).json()["choices"]
        for choice in choices:
            assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout")
        assert any(choice["text"] for choice in choices)
        text = client.post(COMPLETIONS, json=body | {"stream": True}).text
        assert '"stop_reason":"timeout"' in text and text.endswith("data: [DONE]\n\n")
    assert host.wait_until_idle().num_blocks_used == 0


def talk(port, data, *, more=b"", timeout=300):
    """What the server says to these bytes; `more` is sent again and again until it hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        received = b""
        try:
            connection.sendall(data)
            connection.settimeout(0.05)
            deadline = time.monotonic() + timeout
            while time.monotonic() < deadline:
                if more:
                    connection.sendall(more)
                try:
                    part = connection.recv(65536)
                except TimeoutError:
                    continue
                if not part:
                    return received
                received += part
        except (ConnectionError, BrokenPipeError):
            return received
    raise AssertionError("the server waits on and on")


def test_heads_have_an_end(host):
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    chunked = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
    chunked += b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    with host.serve(max_header_bytes=4096) as client:
        many = b"".join(b"X-%d: a\r\n" % number for number in range(2000))
        for data in (
            start + b"X: " + b"a" * 5000 + b"\r\n\r\n",
            start + many + b"\r\n",
            b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n",
        ):
            assert talk(client.port, data).startswith(b"HTTP/1.1 431 ")
        # Without an end: a header, or headers. Trailers are headers, too.
        assert talk(client.port, start + b"X: ", more=b"a" * 500)[:12] in (b"HTTP/1.1 431", b"")
        assert talk(client.port, start, more=b"Y: a\r\n" * 100)[:12] in (b"HTTP/1.1 431", b"")
        assert b"HTTP/1.1 431" in talk(client.port, chunked + many + b"\r\n\r\n" + start)
        endless = talk(client.port, chunked + b"X: ", more=b"a" * 500)
        assert endless[:12] in (b"HTTP/1.1 431", b"")
        assert talk(client.port, b"\x16\x03\x01 what is this\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert client.get("/health").status_code == 200
    with host.serve(client_timeout=0.5) as client:
        assert talk(client.port, start) == b""
        assert talk(client.port, b"") == b""


def test_an_idle_connection_is_kept_longer_than_clients_keep_it(client):
    clients_keep_it_s = 5.0  # by default: httpx, and with it the official clients
    assert httpx.Limits().keepalive_expiry == clients_keep_it_s < KEEP_IDLE_S
    assert client.server.config.timeout_keep_alive == KEEP_IDLE_S


def test_after_an_answer_the_next_head_is_watched(host):
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    # Long enough for the first head, which has been sent as a whole, on a busy machine.
    with (
        host.serve(client_timeout=3) as client,
        socket.create_connection(("127.0.0.1", client.port), timeout=KEEP_IDLE_S / 2) as connection,
    ):
        connection.sendall(start + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(start)
        assert connection.recv(65536) == b""  # sooner than an idle one


def test_a_body_that_does_not_come_is_not_waited_for(host):
    with host.serve(client_timeout=2) as client:  # it has to read the head in this time
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\n"
        answer = talk(client.port, head + b"Content-Length: 1000\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408 ") and b"connection: close" in answer.lower()


def test_a_client_that_reads_nothing_is_let_go(host):
    # More than could be ended before anybody notices that nothing is read.
    body = b'{"prompt": "a", "n": 32, "max_tokens": 2000, "ignore_eos": true, "stream": true,'
    body += b'"logprobs": 20, "model": "tiny"}'
    with host.serve(client_timeout=0.5) as client:
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            deadline = time.monotonic() + 300
            while not host.engine.num_unfinished:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            while host.engine.num_unfinished:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        tokens = client.get("/metrics").text
        assert 'finished_reason="abort"' in tokens


def test_with_a_certificate_it_speaks_https(host, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    if subprocess.run(["which", "openssl"], capture_output=True).returncode:
        pytest.skip("there is no openssl to make a certificate with")
    subprocess.run(command.split(), check=True, capture_output=True)
    with host.serve(ssl_certfile=str(cert), ssl_keyfile=str(key)) as client:
        url = f"https://127.0.0.1:{client.port}/health"
        assert httpx.get(url, verify=ssl.create_default_context(cafile=cert)).status_code == 200
        with pytest.raises(httpx.HTTPError):
            client.get("/health")


def test_many_at_once_all_get_their_answers(client):
    found = {}

    def ask(number):
        body = {"prompt": f"number {number}", "max_tokens": 5, "ignore_eos": True}
        found[number] = client.post(COMPLETIONS, json=body).json()["usage"]["completion_tokens"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(24), 5)
