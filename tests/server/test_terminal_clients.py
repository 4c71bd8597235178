"""`jaxllm chat --url` and `jaxllm complete`, with a real server at the other end."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxllm.cli.conversation import Conversation
from jaxllm.cli.http_client import HTTPClient
from jaxllm.cli.main import main
from jaxllm.cli.remote_model import RemoteModel
from jaxllm.errors import JaxLLMError

SAMPLING = {"temperature": 0.8, "top_k": 50, "max_tokens": 12, "seed": 7}
FLAGS = ["--temperature=0.8", "--top-k=50", "--max-tokens=12", "--seed=7"]
LONG = {"max_tokens": 1900, "ignore_eos": True}
GO_ON = threading.Event()  # never set

slow = pytest.mark.slow  # the first one starts an engine


def url_of(client):
    return f"http://127.0.0.1:{client.port}/v1"


def chat_answer(client, *said, system=None):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    response = client.post("/v1/chat/completions", json={"messages": messages, **SAMPLING})
    return response.json()["choices"][0]["message"]["content"]


def completion(client, prompt):
    response = client.post("/v1/completions", json={"prompt": prompt, **SAMPLING})
    return response.json()["choices"][0]["text"]


@slow
def test_a_conversation_through_a_pipe(client, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd then?\n/reset\nHello\n"))
    assert main(["chat", "--url", url_of(client), "--system-prompt=Be brief.", *FLAGS]) == 0
    first = chat_answer(client, "Hello", system="Be brief.")
    second = chat_answer(client, "Hello", first, "And then?", system="Be brief.")
    assert capsys.readouterr().out == f"{first}\n{second}\n{first}\n"


@slow
def test_one_quick_question_to_a_named_model_with_a_key(host, capsys):
    with host.serve(keys=("secret",), access_log=False) as client:
        client.headers["Authorization"] = "Bearer secret"
        flags = ["--model-name=alias", "--api-key=secret", *FLAGS]
        assert main(["chat", "--url", url_of(client), "-q", "Hello", *flags]) == 0
        assert capsys.readouterr().out == chat_answer(client, "Hello") + "\n"


@slow
def test_a_key_may_be_in_the_environment_and_its_want_is_told(host, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with host.serve(keys=("secret",), access_log=False) as client:
        for flags in ([], ["--model-name=alias"]):
            asked = ["complete", "--url", url_of(client), "-q", "Hello", *flags, *FLAGS]
            assert main(asked) == 2
            assert "give --api-key-file FILE or --api-key KEY" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert main(asked) == 0


@slow
def test_prompts_are_completed(client, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon\nThe house\n"))
    assert main(["complete", "--url", url_of(client), *FLAGS]) == 0
    answers = [completion(client, prompt) for prompt in ("Once upon", "The house")]
    assert capsys.readouterr().out == "\n".join([*answers, ""])
    assert main(["complete", "--url", url_of(client), "--quick=Once upon", *FLAGS]) == 0
    assert capsys.readouterr().out == answers[0] + "\n"


@slow
def test_reasoning_is_no_part_of_the_answer(host, capsys):
    with host.serve(reasoning_parser="deepseek_r1", access_log=False) as client:
        assert main(["chat", "--url", url_of(client), "-q", "Hello", *FLAGS]) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n"  # noise does not end the reasoning
    assert len(captured.err) > 5


@slow
def test_stop_aborts_on_the_server_and_keeps_what_came(host, client):
    before = host.wait_until_idle().num_generation_tokens
    conversation = Conversation(RemoteModel(HTTPClient(url_of(client)), None, LONG))
    stop = threading.Event()
    stream = conversation.reply("Hello", stop)
    pieces = [next(stream), next(stream)]
    stop.set()
    pieces += stream
    assert conversation.turns == [("Hello", "".join(pieces))]
    stats = host.wait_until_idle()
    assert stats.num_blocks_used == 0
    assert stats.num_generation_tokens - before < LONG["max_tokens"]


@slow
def test_interrupt_stops_the_answer_and_not_the_program(host, client, monkeypatch, capsys):
    before = host.wait_until_idle().num_generation_tokens

    def interrupt_when_running():
        deadline = time.monotonic() + 300
        while not host.call(host.engine.stats()).num_requests_running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_running)
    thread.start()
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/reset\n"))
    assert main(["chat", "--url", url_of(client), "--ignore-eos", "--max-tokens=1900"]) == 0
    thread.join()
    assert "The conversation is forgotten." in capsys.readouterr().err
    assert host.wait_until_idle().num_generation_tokens - before < 1900


@slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--api-key=wrong"], "an API key is needed"),
        (["--api-key=right", "--model-name=other"], "status 404: "),
        (["--api-key=right", "--logit-bias", '{"99999": 1}'], "status 400: logit_bias"),
    ],
)
def test_what_the_server_refuses_is_told(host, capsys, flags, said):
    with host.serve(keys=("right",), access_log=False) as client:
        assert main(["chat", "--url", url_of(client), "-q", "Hello", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "jaxllm: error: http://127.0.0.1" in captured.err and said in captured.err


@slow
def test_a_url_without_its_end_is_told(client, capsys):
    assert main(["chat", "--url", str(client.base_url), "-q", "Hello"]) == 2
    assert "status 404" in (said := capsys.readouterr().err) and "end with /v1?" in said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["chat", "--url=localhost:8000"], "url='localhost:8000': give one like http://"),
        (["chat", "--url=http://a:b"], "give one like http://"),
        (["chat", "some-model", "--url=http://a/v1"], "model: the server behind --url has"),
        (["chat", "-tp=2", "--chat-template=x", "--url=http://a"], "leave them out"),
        (["chat", "some-model", "--api-key=a"], "api_key needs --url"),
        (["chat", "--url=http://a/v1", "--api-key=\n"], "api_key: a key is printable ASCII"),
        (["complete", "--top-p=2"], "top_p"),
    ],
)
def test_flags_that_cannot_be_are_refused(argv, said, capsys):
    assert main(argv) == 2
    assert said in capsys.readouterr().err


class StrangeServer:
    """Answers the first connection with these bytes, and hangs up."""

    def __init__(self, answer: bytes):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as request:
            # All of it: what is left unread would make of the hanging up a reset.
            head = iter(request.readline, b"\r\n")
            (length,) = (
                int(line.split()[1]) for line in head if line.startswith(b"Content-Length")
            )
            request.read(length)
            connection.sendall(self._answer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._thread.join()
        self._listener.close()


CHUNK = b'data: {"choices": [{"delta": {"content": "Well"}}]}\n\n'


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (CHUNK, "ended in the midst of an answer"),
        (CHUNK + b'data: {"error": {"message": "no memory"}}\n\n', "no memory"),
        (CHUNK + b'data: {"choices": 3}\n\n', "not OpenAI's protocol"),
        (CHUNK + b"data: nonsense\n\n", "not OpenAI's protocol"),
    ],
)
def test_an_answer_that_goes_wrong_is_an_error_and_no_turn(events, said):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    with StrangeServer(head + events) as server:
        conversation = Conversation(RemoteModel(HTTPClient(server.url), "m", {}))
        stream = conversation.reply("Hello", GO_ON)
        assert next(stream) == "Well"
        with pytest.raises(JaxLLMError, match=said):
            list(stream)
        assert conversation.turns == []


def test_without_a_server_it_is_told_and_nothing_heavy_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    code = (
        "import sys; from jaxllm.cli.main import main\n"
        f"assert main(['chat', '--url=http://127.0.0.1:{port}/v1', '-q', 'Hello']) == 2\n"
        "print(*{'jax', 'transformers', 'numpy', 'httpx', 'asyncio'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Connection refused; is the server there?" in done.stderr
    assert done.stdout.split() == []
