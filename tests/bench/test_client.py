"""What the client makes of answers, good and bad, byte for byte."""

import asyncio
import itertools

import pytest

from jaxllm.async_http import HTTPClient
from jaxllm.bench.client import OpenAIClient, find_model
from jaxllm.bench.datasets import BenchRequest
from jaxllm.bench.load import run_load, warm_up
from jaxllm.bench.options import LoadOptions
from jaxllm.errors import JaxLLMError, UnauthorizedError, ValidationError

OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"
REQUEST = BenchRequest("Once", 1, 5)


def chunked(*parts):
    """Each part is a chunk of its own, and the end follows."""
    return [b"%x\r\n%b\r\n" % (len(part), part) for part in parts] + [b"0\r\n\r\n"]


def event(text, **more):
    reason = f'"{more["reason"]}"' if "reason" in more else "null"
    return f'data: {{"choices":[{{"text":"{text}","finish_reason":{reason}}}]}}\n\n'.encode()


def delta(fields):
    return f'data: {{"choices":[{{"delta":{{{fields}}},"finish_reason":null}}]}}\n\n'.encode()


def outcomes_of(port, num_requests=1, max_concurrency=None, **options):
    async def run():
        load = LoadOptions(**options)
        http = HTTPClient(f"http://127.0.0.1:{port}", {})
        client = OpenAIClient.of(http, load, "m")
        requests = [REQUEST] * num_requests
        done = await run_load(client, requests, [0.0] * num_requests, max_concurrency)
        http.close()
        return done.outcomes

    return asyncio.run(run())


def outcome_of(scripted_server, parts, **options):
    [outcome] = outcomes_of(scripted_server(lambda number: parts), **options)
    return outcome


def test_several_tokens_in_a_piece_are_counted_by_usage(scripted_server):
    parts = [OK, *chunked(event("a b"), event(" c d", reason="stop"), USAGE, DONE)]
    outcome = outcome_of(scripted_server, parts)
    assert (outcome.error, outcome.text) == ("", "a b c d")
    assert (outcome.prompt_len, outcome.output_len) == (7, 5)
    assert len(outcome.itl) == 1
    assert 0 < outcome.ttft < outcome.latency
    assert outcome.latency == pytest.approx(outcome.ttft + sum(outcome.itl))
    assert outcome.tpot == pytest.approx(outcome.itl[0] / 4)


def test_it_does_not_matter_where_the_stream_is_cut(scripted_server):
    body = event("a") + b": a comment\n\n" + event("\\u00e9", reason="stop") + USAGE + DONE
    parts = [OK, *chunked(*(body[i : i + 7] for i in range(0, len(body), 7)))]
    outcome = outcome_of(scripted_server, parts)
    assert (outcome.error, outcome.text, outcome.output_len) == ("", "aé", 5)


def test_events_of_one_packet_are_pieces_of_their_own(scripted_server):
    body = b"".join(map(event, "abcd")) + event("e", reason="length") + USAGE + DONE
    outcome = outcome_of(scripted_server, [OK, *chunked(body)])
    assert outcome.text == "abcde"
    assert outcome.itl == [0, 0, 0, 0]


def test_a_chat_begins_with_its_first_token_and_not_with_its_role(scripted_server):
    parts = [
        OK,
        *chunked(
            delta('"role":"assistant","content":""'),
            delta('"reasoning":"hm"'),
            delta('"content":"yes"'),
            delta('"tool_calls":[{"index":0}]'),
            b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
            USAGE,
            DONE,
        ),
    ]
    outcome = outcome_of(scripted_server, parts, backend="openai-chat")
    assert (outcome.error, outcome.text) == ("", 'hmyes[{"index":0}]')
    assert len(outcome.itl) == 2
    assert outcome.ttft > 0.015  # two pauses of 10 ms before it


def test_a_body_may_end_with_the_connection(scripted_server):
    parts = [b"HTTP/1.1 200 OK\r\n\r\n", event("a", reason="stop") + USAGE + DONE]
    outcome = outcome_of(scripted_server, parts)
    assert (outcome.error, outcome.text) == ("", "a")


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([], "the connection ended without a response"),
        ([b"HTTP/1.1 200"], "the connection ended in the middle of the response"),
        ([b"nonsense\r\n\r\n"], "not HTTP"),
        ([OK, *chunked(event("a"))[:-1]], "the connection ended in the middle of the response"),
        ([OK, *chunked(event("a"))], "the stream ended in the middle of the answer"),
        ([OK, *chunked(event("a", reason="stop"), DONE)], "does not say how many tokens"),
        ([OK, *chunked(USAGE, DONE)], "the answer is empty"),
        ([OK, *chunked(b'data: {"choices": 1}\n\n', USAGE, DONE)], "not what it should be"),
        (
            [OK, *chunked(event("a"), b'data: {"error":{"message":"it died"}}\n\n', USAGE, DONE)],
            "in the stream: it died",
        ),
        (
            [
                b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 30\r\n\r\n",
                b'{"error":{"message":"so busy"}}'[:30],
            ],
            'status 503: {"error":{"message":"so busy"}',  # not JSON: shown as it is
        ),
        (
            [
                b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 31\r\n\r\n",
                b'{"error":{"message":"so busy"}}',
            ],
            "status 503: so busy",
        ),
    ],
)
def test_whatever_is_not_a_whole_answer_has_failed(scripted_server, parts, error):
    outcome = outcome_of(scripted_server, parts)
    assert outcome.has_failed
    assert error in outcome.error
    assert outcome.output_len == 0


def test_nobody_there():
    [outcome] = outcomes_of(1)
    assert outcome.has_failed
    assert outcome.error
    with pytest.raises(JaxLLMError, match="no server at http://127.0.0.1:1: "):
        asyncio.run(find_model(HTTPClient("http://127.0.0.1:1", {})))


def test_a_server_that_hangs_up_before_tls_begins_has_not_answered():
    async def hang_up(reader, writer):
        await reader.read(1 << 16)
        writer.close()

    async def run():
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        http = HTTPClient(f"https://127.0.0.1:{port}", {}, insecure=True)
        outcome = await OpenAIClient.of(http, LoadOptions(), "m").send(REQUEST, 0.0)
        server.close()
        return outcome

    assert asyncio.run(run()).error == "ConnectionResetError"  # which says no more


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"data":[{"id":"a","root":"/models/a"}]}', ("a", "/models/a", None)),
        (b'{"data":[{"id":"a","max_model_len":9},{"id":"b"}]}', ("a", "a", 9)),
        (b'{"data":[]}', None),
        (b"hello", None),
    ],
)
def test_the_model_is_the_first_that_the_server_has(scripted_server, body, found):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    http = HTTPClient(f"http://127.0.0.1:{scripted_server(lambda number: [head, body])}", {})
    if found is None:
        with pytest.raises(JaxLLMError, match="/v1/models names no model; give --model"):
            asyncio.run(find_model(http))
    else:
        assert asyncio.run(find_model(http)) == found


def test_of_a_named_model_the_server_need_not_know_anything(scripted_server):
    def find(name, status, body):
        head = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        http = HTTPClient(f"http://127.0.0.1:{scripted_server(lambda number: [head, body])}", {})
        return asyncio.run(find_model(http, name))

    listed = b'{"data":[{"id":"a"},{"id":"b","max_model_len":7}]}'
    assert find("b", 200, listed) == ("b", "b", 7)
    assert find("c", 200, listed) == ("c", "c", None)
    assert find("c", 404, b"") == ("c", "c", None)
    with pytest.raises(UnauthorizedError, match="a key is needed"):
        find("b", 401, b'{"error":{"message":"a key is needed"}}')


def test_a_server_that_says_nothing_is_given_up(scripted_server):
    port = scripted_server(lambda number: itertools.chain([OK], itertools.repeat(b"")))
    [outcome] = outcomes_of(port, request_timeout=0.2)
    assert outcome.error == "no complete answer within 0.2 s"
    assert outcome.latency >= 0.2


def test_failures_stay_with_their_requests(scripted_server):
    """Of four requests one is refused, one cut off, one dropped. The server also closes connections
    that it had promised to keep, which is no failure of the next request."""
    good = [OK, *chunked(event("a", reason="stop"), USAGE, DONE)]
    busy = [b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"]
    port = scripted_server(lambda number: [good, busy, good[:2], []][number % 4])
    outcomes = outcomes_of(port, num_requests=8, max_concurrency=1)
    assert [bool(o.error) for o in outcomes] == [False, True, True, True] * 2
    assert [o.output_len for o in outcomes] == [5, 0, 0, 0] * 2


def test_concurrency_is_bounded_and_waiting_is_not_measured(scripted_server):
    good = [OK, *chunked(event("a", reason="stop"), USAGE, DONE)]
    outcomes = outcomes_of(scripted_server(lambda number: good), 6, max_concurrency=2)
    for place, outcome in enumerate(outcomes):
        running = [o for o in outcomes if o.start <= outcome.start < o.start + o.latency]
        assert len(running) <= 2, place
    assert outcomes[-1].start > outcomes[0].start + outcomes[0].latency


def test_a_run_does_not_begin_with_a_server_that_fails(scripted_server):
    async def run(port, **options):
        load = LoadOptions(**options)
        client = OpenAIClient.of(HTTPClient(f"http://127.0.0.1:{port}", {}), load, "m")
        await warm_up(client, [REQUEST], load)

    bad = [b"HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\n\r\nno such"]
    with pytest.raises(JaxLLMError, match="which is a trial, failed: status 404: no such"):
        asyncio.run(run(scripted_server(lambda number: bad)))
    good = [OK, *chunked(event("a", reason="stop"), USAGE, DONE)]
    port = scripted_server(lambda number: [bad, good][min(number, 1)])
    asyncio.run(run(port, ready_check_timeout_sec=200.0))


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://localhost", "http://", "http://a:b", "http://a:70000", "http://[::1"],
)
def test_addresses_that_are_none(url):
    with pytest.raises(ValidationError, match="base_url"):
        HTTPClient(url, {})


def test_a_header_is_one_line():
    with pytest.raises(ValidationError, match="a header is one line"):
        HTTPClient("http://localhost", {"X": "a\r\nY: b"})


@pytest.mark.parametrize("url, header", [("http://127.0.0.1:1", "\u2603"), ("http://a/\u2603", "")])
def test_what_http_has_no_letters_for_is_refused(url, header):
    with pytest.raises(ValidationError, match="Latin-1"):
        asyncio.run(find_model(HTTPClient(url, {"X": header})))
