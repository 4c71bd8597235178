"""Who leaves wants no answer: the engine is told at once."""

import socket

import httpx
import pytest

pytestmark = pytest.mark.slow  # the first one starts an engine

LONG = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": True, "n": 2, "prompt": ["a", "b"]}])
def test_leaving_a_stream_aborts_it(host, client, body):
    before = host.wait_until_idle().num_generation_tokens
    with client.stream("POST", "/v1/completions", json=LONG | body) as stream:
        for _, _line in zip(range(5), stream.iter_lines(), strict=False):
            pass
    stats = host.wait_until_idle()
    assert stats.num_blocks_used == 0
    assert stats.num_generation_tokens - before < 2000
    assert host.engine.num_unfinished == 0


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_leaving_before_the_answer_aborts_it(host, client, prompt):
    before = host.wait_until_idle().num_generation_tokens
    with pytest.raises(httpx.ReadTimeout):
        timeout = httpx.Timeout(300, read=0.3)
        client.post("/v1/completions", json=LONG | {"prompt": prompt}, timeout=timeout)
    stats = host.wait_until_idle()
    assert stats.num_blocks_used == 0
    assert stats.num_generation_tokens - before < 2000
    assert host.engine.num_unfinished == 0


def test_leaving_in_the_midst_of_a_body_leaves_nothing(host, client):
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    assert host.engine.num_unfinished == 0


def test_an_error_in_the_midst_of_a_stream_is_its_last_event(host, client):
    with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        host.call(host.engine.abort(list(host.engine._collectors)))
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"error":{"message":"the request was aborted' in rest[-2]
