"""Bytes that are no proper request, on raw sockets: each is refused or hung up on, nothing grows,
and a good request beside them is answered all the time."""

import asyncio
import gzip
import json
import os
import random
import socket
import threading
import time
from pathlib import Path

import httptools
import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

pytestmark = pytest.mark.slow  # the first one starts an engine

HOST = b"Host: localhost\r\n"
POST = b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
GET = b"GET /version HTTP/1.1\r\n" + HOST
BODY = b'{"prompt": "a"}'
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LIMITS = {"max_header_bytes": 8192, "max_body_bytes": 1 << 16, "client_timeout": 20}


class Talk:
    """What a server says to bytes; after that nobody sends any more, and it has to hang up.

    It is waited for as many answers as are wanted, and a moment for others.
    """

    def __init__(self, port, data, wanted=0):
        self.statuses = []
        self._num_whole = 0
        self._parser = httptools.HttpResponseParser(self)
        with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
            try:
                connection.sendall(data)
                self._listen(connection, wanted)
                connection.settimeout(300)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(1 << 16):
                    self._parser.feed_data(part)
            except OSError as error:
                assert not isinstance(error, TimeoutError), (data[:200], self.statuses)

    def _listen(self, connection, wanted):
        try:
            while True:
                connection.settimeout(0.03 if self._num_whole >= wanted else 300)
                part = connection.recv(1 << 16)
                if not part:
                    return
                self._parser.feed_data(part)
        except TimeoutError:
            assert self._num_whole >= wanted, self.statuses

    def on_headers_complete(self):
        self.statuses.append(self._parser.get_status_code())

    def on_message_complete(self):
        self._num_whole += 1


def statuses(server, data, *, wanted=1):
    return Talk(server.port, data, wanted).statuses


def post(body, head=b""):
    return POST + head + b"Content-Length: %d\r\n\r\n" % len(body) + body


HTTP = {
    # Where does a request end? Two answers to this are a request that somebody smuggles.
    "length and chunks": (
        POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET, [400]
    ),
    "chunks and length": (
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + GET, [400]
    ),
    "two lengths": (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", [400]),
    "a list of lengths": (POST + b"Content-Length: 2, 2\r\n\r\n{}", [400]),
    "a length with a sign": (POST + b"Content-Length: +2\r\n\r\n{}", [400]),
    "a length below zero": (POST + b"Content-Length: -2\r\n\r\n{}", [400]),
    "a length in hex": (POST + b"Content-Length: 0x2\r\n\r\n{}", [400]),
    "a length of many digits": (POST + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n{}", [400]),
    "a length of 2**64 + 2": (POST + b"Content-Length: 18446744073709551618\r\n\r\n{}", [400]),
    "chunks that are not last": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n", [400]),
    "chunks by another name": (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", [400]),
    "a space before the colon": (POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", [400]),
    "a header in two lines": (POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", [400]),
    "chunks of -1": (CHUNKED + b"-1\r\n", [400]),
    "chunks of 0x2": (CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n", [400]),
    "chunks of very many": (CHUNKED + b"F" * 17 + b"\r\n{}", [400]),
    "chunks of no number": (CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n", [400]),
    "a chunk that is longer than it says": (CHUNKED + b"1\r\n{}\r\n0\r\n\r\n", [400]),
    "a chunk without an end": (CHUNKED + b"ffff\r\n{}", []),
    # Lines and letters.
    "a NUL in a header": (GET + b"X: a\0b\r\n\r\n", [400]),
    "a NUL in a name": (GET + b"X\0: a\r\n\r\n", [400]),
    "a name without letters": (GET + b": a\r\n\r\n", [400]),
    "a header without a colon": (GET + b"X\r\n\r\n", [400]),
    "a carriage return alone": (GET + b"X: a\rb\r\n\r\n", [400]),
    "a path with a space": (b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    "a path of other bytes": (b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    "a path of percents": (b"GET /%00%ff%2f%zz HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    "a path of dots": (b"GET /../../etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    "a path without a slash": (b"GET a HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    "a very long path": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", [431]),
    "a very long header": (GET + b"X: " + b"a" * 9000 + b"\r\n\r\n", [431]),
    "a flood of headers": (GET + b"X: a\r\n" * 9000 + b"\r\n", None),
    "a flood of trailers": (CHUNKED + b"0\r\n" + b"X: a\r\n" * 9000 + b"\r\n", None),
    # Methods, versions and other protocols.
    "no method": (b" / HTTP/1.1\r\n\r\n", [400]),
    "a method in small letters": (b"get / HTTP/1.1\r\n\r\n", [400]),
    "a method of nobody": (b"BREW / HTTP/1.1\r\n\r\n", [400]),
    "CONNECT": (b"CONNECT a:443 HTTP/1.1\r\n" + HOST + b"\r\n", None),
    "TRACE": (b"TRACE /version HTTP/1.1\r\n" + HOST + b"\r\n", [405]),
    "DELETE": (b"DELETE /v1/models/tiny HTTP/1.1\r\n" + HOST + b"\r\n", [405]),
    "a star": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", None),
    "HTTP/0.9": (b"GET /version\r\n\r\n", [400]),
    "HTTP/1.0": (b"GET /version HTTP/1.0\r\n\r\n", [200]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400]),
    "HTTP/9.9": (b"GET /version HTTP/9.9\r\n\r\n", [400]),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", [400]),
    "a web socket": (
        GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
        [200],
    ),
    "another protocol": (GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", [200]),
    "nothing": (b"", []),
    "empty lines": (b"\r\n" * 100, []),
    # These are in order.
    "an absolute address": (b"GET http://b/version HTTP/1.1\r\n" + HOST + b"\r\n", [200]),
    "three at once": ((GET + b"\r\n") * 3, [200] * 3),
    "one after a bad one": (post(b"{") + GET + b"\r\n", [400, 200]),
    "one after another that is not read": (
        POST.replace(b"json", b"xml") + b"Content-Length: 2\r\n\r\n{}" + GET + b"\r\n", [415]
    ),
    "chunks": (CHUNKED + b"2\r\n{\"\r\n0d\r\nprompt\": \"a\"}\r\n0\r\n\r\n", [200]),
    "a slash too many": (b"GET /version/ HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
}  # fmt: skip

JSON = {
    "nothing": b"",
    "a half": BODY[:8],
    "two": BODY + BODY,
    "a list": b"[" + BODY + b"]",
    "NaN": b'{"prompt": "a", "model": NaN}',
    "infinity": b'{"prompt": "a", "model": -Infinity}',
    "1e999": b'{"prompt": "a", "model": 1e999}',
    "a long integer": b'{"prompt": ' + b"9" * 5000 + b"}",
    "a long fraction": b'{"prompt": 0.' + b"9" * 5000 + b"e-99999}",
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "surrogates the wrong way": b'{"prompt": "\\udc00\\ud800"}',
    "a NUL": b'{"prompt": "\0"}',
    "no UTF-8": b'{"prompt": "\xff"}',
    "too long UTF-8": b'{"prompt": "\xc0\xaf"}',
    "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "UTF-16": BODY.decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + BODY,
    "deep lists": b"[" * 30_000 + b"]" * 30_000,
    "deep objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "deep lists in a field": b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
    "a comment": b'{"prompt": "a" /* b */}',
    "a comma too many": b'{"prompt": "a",}',
    "single quotes": b"{'prompt': 'a'}",
    "an unknown field": b'{"prompt": "a", "' + b"b" * 2000 + b'": 1}',
    "compressed": gzip.compress(BODY),
    "deep text": json.dumps(
        {"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "[" * 20_000}}
        ]}]}
    ).encode(),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(host):
    with host.serve(access_log=False, **LIMITS) as client:
        client.timeout = 300  # answers of a new kind are compiled for first
        yield client


@pytest.fixture(scope="module", autouse=True)
def beside(server):
    """Somebody who asks properly all the time, on one connection."""
    found, ended = [], threading.Event()

    def ask():
        body = {"prompt": "Once", "max_tokens": 2, "ignore_eos": True}
        with httpx.Client(base_url=server.base_url, timeout=300) as client:
            while not ended.is_set():
                answer = client.post("/v1/completions", json=body)
                found.append(answer.json()["usage"]["completion_tokens"])
                time.sleep(0.05)

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    ended.set()
    thread.join()
    assert found and set(found) == {2}


@pytest.mark.parametrize("name", HTTP)
def test_http(server, name):
    data, expected = HTTP[name]
    if expected is None:  # it may be refused or hung up on
        found = statuses(server, data, wanted=0)
        assert len(found) <= 1 and all(400 <= status < 500 for status in found)
    else:
        assert statuses(server, data, wanted=len(expected)) == expected


@pytest.mark.parametrize("name", JSON)
def test_json(server, name):
    body = JSON[name]
    assert statuses(server, post(body)) == [400]
    if len(body) < 5000:
        chunks = b"".join(b"1\r\n%b\r\n" % body[i : i + 1] for i in range(len(body)))
        assert statuses(server, CHUNKED + chunks + b"0\r\n\r\n") == [400]


def test_a_body_that_is_encoded_is_refused(server):
    for encoding in (b"gzip", b"br", b"deflate, gzip"):
        head = b"Content-Encoding: " + encoding + b"\r\n"
        assert statuses(server, post(gzip.compress(BODY), head)) == [415]
    assert statuses(server, post(BODY, b"Content-Encoding: identity\r\n")) == [200]


def test_the_last_of_equal_keys_counts(server):
    assert statuses(server, post(b'{"prompt": 1, "prompt": "a"}')) == [200]
    assert statuses(server, post(b'{"prompt": "a", "prompt": 1}')) == [400]


COMPLETION = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True, "n": 2}).encode()
WHOLE = [
    GET + b"\r\n",
    post(BODY),
    CHUNKED + b"f\r\n" + BODY + b"\r\n0\r\n\r\n",
    post(COMPLETION).replace(b"/tokenize", b"/v1/completions"),
    (GET + b"\r\n") * 2,
]
TOKENS = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\xff", b"{", b"}", b"[", b'"', b"\\u", b"%", b"/",
    b"Content-Length: 1\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n",
    b"Expect: 100-continue\r\n", b"HTTP/1.1", b"0\r\n\r\n", b"a" * 9000, b"9" * 30, b"null",
]  # fmt: skip


@st.composite
def mutated(draw):
    """A request in which a few places are not what they were."""
    data = bytearray(draw(st.sampled_from(WHOLE)))
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.integers(0, 12)))
        new = draw(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=6), st.just(b"")))
        data[begin:end] = new
    return bytes(data)


@hypothesis.settings(max_examples=250, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=mutated())
def test_no_bytes_make_the_server_fail(server, data):
    assert all(100 <= status < 500 for status in Talk(server.port, data).statuses), data


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
        st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 1e308, "\0", "\U0010ffff", ""]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=6,
)  # fmt: skip
FIELDS = st.sampled_from(
    "prompt messages model n temperature top_p top_k min_p seed stop logit_bias logprobs "
    "top_logprobs prompt_logprobs stop_token_ids allowed_token_ids bad_words stream stream_options "
    "tools tool_choice echo chat_template_kwargs truncate_prompt_tokens priority cache_salt "
    "request_id vllm_xargs min_tokens repetition_penalty".split()
)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]),
    fields=st.dictionaries(FIELDS, VALUES, max_size=4),
    needed=st.booleans(),
)
def test_no_values_make_the_server_fail(server, path, fields, needed):
    if needed:
        given = {"messages": [{"role": "user", "content": "a"}]}
        fields = (given if "chat" in path else {"prompt": "a"}) | fields
    body = json.dumps(fields | {"max_tokens": 2} if "v1" in path else fields).encode()
    response = server.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404), (fields, response.text)


async def _num_tasks():
    return len(asyncio.all_tasks())


async def _start_all_threads():
    """How many there are otherwise depends on how much once was under way at a time."""
    go_on = threading.Event()
    tasks = [asyncio.create_task(asyncio.to_thread(go_on.wait)) for _ in range(64)]
    await asyncio.sleep(0)  # all are in the queue of the threads
    go_on.set()
    await asyncio.gather(*tasks)


def _resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_nothing_grows(server, host):
    shapes = [data for data, _ in HTTP.values()] + [post(body) for body in JSON.values()]
    # Large ones, which would be seen if they were kept.
    shapes += [post(b'{"prompt": "' + b"a" * 60_000 + end) for end in (b'"', b'"} 1')]
    shapes += [POST + b"Content-Length: 65000\r\n\r\n" + b"a" * 60_000] * 2

    def measured():
        """Tasks, files and threads once all connections are gone, and bytes of memory."""
        deadline = time.monotonic() + 300
        while (tasks := host.call(_num_tasks())) > first_tasks + 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        files = len(os.listdir("/proc/self/fd"))
        return tasks, files, threading.active_count(), _resident_bytes()

    host.call(_start_all_threads())
    first_tasks = host.call(_num_tasks())
    order = random.Random(0)

    def play():
        order.shuffle(shapes)
        threads = [
            threading.Thread(target=lambda part: [Talk(server.port, one) for one in part],
                             args=(shapes[start::4],))
            for start in range(4)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for _ in range(3):
        play()
    tasks, files, num_threads, resident = measured()
    for _ in range(6):
        play()
    tasks_then, files_then, num_threads_then, resident_then = measured()
    # The one who asks beside it comes and goes.
    assert tasks_then <= tasks + 3 and files_then <= files + 2
    assert num_threads_then == num_threads
    assert resident_then - resident < 16 << 20
