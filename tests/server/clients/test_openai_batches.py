"""OpenAI's own client at /v1/files and /v1/batches."""

import json
import threading
import time

import openai
import pytest
from openai.types import Batch, FileObject

from jaxllm.openai.batches.store import BatchLimits, BatchStore

pytestmark = pytest.mark.slow  # the first one starts an engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WINDOW = {"completion_window": "24h"}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0}


@pytest.fixture
def keeping(host, tmp_path):
    """A function that serves a directory of batches to two keys."""

    def serve(**options):
        directory = str(tmp_path / "batches")
        return host.serve(keys=("a", "b"), batch_dir=directory, access_log=False, **options)

    return serve


def client_of(server, key="a"):
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0)


def line(custom_id, body, url=CHAT):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def upload(client, *lines):
    data = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return client.files.create(file=("in.jsonl", data.encode()), purpose="batch").id


def until(client, batch, *statuses):
    deadline = time.monotonic() + 300
    while batch.status not in statuses:
        assert time.monotonic() < deadline and batch.status != "failed", batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def records(client, file_id):
    return {
        one["custom_id"]: one
        for one in map(json.loads, client.files.content(file_id).text.splitlines())
    }


def test_a_batch_of_responses(keeping):
    path = "/v1/responses"
    body = {"input": "Hello", "temperature": 0, "max_output_tokens": 4}
    with keeping() as server:
        client = client_of(server)
        stored = line("stored", body | {"store": True}, path)
        file_id = upload(client, line("a", body, path), stored)
        batch = client.batches.create(input_file_id=file_id, endpoint=path, **WINDOW)
        batch = until(client, batch, "completed")
        answer = records(client, batch.output_file_id)["a"]["response"]["body"]
        alone = server.post(path, json=body, headers={"Authorization": "Bearer a"}).json()
        assert answer["output"][0]["content"] == alone["output"][0]["content"]
        error = records(client, batch.error_file_id)["stored"]["response"]
        assert (error["status_code"], error["body"]["error"]["param"]) == (400, "store")


def test_a_batch_has_the_answers_of_its_requests(keeping):
    with keeping() as server:
        client = client_of(server)
        wrong = HELLO | {"temperature": -1}
        lines = [
            *(line(f"{n}", HELLO | {"max_tokens": n}) for n in range(1, 9)),
            line("wrong", wrong),
            line("other", HELLO, COMPLETIONS),
            line("1", HELLO),
            "no JSON",
        ]
        made = client.files.create(
            file=("in.jsonl", "\n".join(
                one if isinstance(one, str) else json.dumps(one) for one in lines
            ).encode()),
            purpose="batch",
        )  # fmt: skip
        FileObject.model_validate(made.model_dump(), strict=True)
        assert (made.filename, made.purpose) == ("in.jsonl", "batch")
        batch = client.batches.create(
            input_file_id=made.id, endpoint=CHAT, metadata={"a": "b"}, **WINDOW
        )
        Batch.model_validate(batch.model_dump(), strict=True)
        assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
        batch = until(client, batch, "completed")
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (12, 8, 4)
        answers = records(client, batch.output_file_id)
        for n in range(1, 9):
            alone = server.post(CHAT, json=HELLO | {"max_tokens": n},
                                headers={"Authorization": "Bearer a"}).json()  # fmt: skip
            response = answers[f"{n}"]["response"]
            assert response["status_code"] == 200
            assert response["body"]["choices"] == alone["choices"]
        errors = [
            json.loads(one) for one in client.files.content(batch.error_file_id).text.splitlines()
        ]
        found = {
            one["custom_id"]: one["error"]["code"]
            if one["error"]
            else one["response"]["body"]["error"]["param"]
            for one in errors
        }
        assert found == {
            "wrong": "temperature",
            "other": "mismatched_url",
            "1": "duplicate_custom_id",
            None: "invalid_json",
        }
        assert [one.id for one in client.batches.list()] == [batch.id]
        outputs = client.files.list(purpose="batch_output").data
        assert {one.id for one in outputs} == {batch.output_file_id, batch.error_file_id}
        for name in (made.id, batch.output_file_id):
            assert client.files.delete(name).deleted
            with pytest.raises(openai.NotFoundError):
                client.files.content(name)


def test_what_a_key_has_made_is_there_for_it_alone(keeping):
    with keeping() as server:
        mine, other = client_of(server), client_of(server, "b")
        file = upload(mine, line("a", HELLO))
        batch = until(
            mine, mine.batches.create(input_file_id=file, endpoint=CHAT, **WINDOW), "completed"
        )
        assert other.files.list().data == [] and other.batches.list().data == []
        for attempt in (
            lambda: other.files.retrieve(file),
            lambda: other.files.content(batch.output_file_id),
            lambda: other.files.delete(file),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(input_file_id=file, endpoint=CHAT, **WINDOW),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        assert mine.files.retrieve(file).id == file


def test_a_batch_goes_on_after_a_restart(keeping):
    long = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}
    lines = [line(f"short {n}", long | {"max_tokens": 2}, COMPLETIONS) for n in range(6)]
    lines += [line(f"long {n}", long | {"max_tokens": 1500}, COMPLETIONS) for n in range(4)]
    with keeping(max_batch_requests=2) as server:
        client = client_of(server)
        batch = client.batches.create(
            input_file_id=upload(client, *lines), endpoint=COMPLETIONS, **WINDOW
        )
        while not client.batches.retrieve(batch.id).request_counts.completed:
            time.sleep(0.05)
    with keeping() as server:
        client = client_of(server)
        before = client.batches.retrieve(batch.id)
        assert before.status == "in_progress" and before.request_counts.completed >= 1
        batch = until(client, batch, "completed")
        assert batch.request_counts.completed == 10
        assert len(client.files.content(batch.output_file_id).text.splitlines()) == 10
        assert records(client, batch.output_file_id).keys() == {one["custom_id"] for one in lines}


def test_a_cancelled_batch_keeps_what_was_answered(keeping, host):
    lines = [line("short", HELLO | {"max_tokens": 1})]
    lines += [line(f"{n}", HELLO | {"max_tokens": 1900, "ignore_eos": True}) for n in range(40)]
    with keeping() as server:
        client = client_of(server)
        file = upload(client, *lines)
        batch = client.batches.create(input_file_id=file, endpoint=CHAT, **WINDOW)
        while not client.batches.retrieve(batch.id).request_counts.completed:
            time.sleep(0.05)
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.delete(file)
        assert caught.value.param == "file_id"
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = until(client, batch, "cancelled")
        assert "short" in records(client, batch.output_file_id)
        assert batch.request_counts.completed < 41 and batch.error_file_id is None
        assert client.batches.cancel(batch.id).status == "cancelled"
        host.wait_until_idle()


def test_what_is_left_of_an_expired_batch_is_an_error(keeping, tmp_path, host):
    lines = [line("short", HELLO | {"max_tokens": 1})]
    lines += [line(f"{n}", HELLO | {"max_tokens": 1900, "ignore_eos": True}) for n in range(40)]
    with keeping() as server:
        client = client_of(server)
        file = upload(client, *lines)
        batch = client.batches.create(input_file_id=file, endpoint=CHAT, **WINDOW)
        while not client.batches.retrieve(batch.id).request_counts.completed:
            time.sleep(0.05)
        BatchStore(str(tmp_path / "batches"), BatchLimits(1, 1)).change(batch.id, expires_at=1)
        batch = until(client, batch, "expired")
        answers = records(client, batch.output_file_id)
        errors = records(client, batch.error_file_id)
        assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
        assert answers.keys() | errors.keys() == {one["custom_id"] for one in lines}
        assert len(answers) + len(errors) == batch.request_counts.total == 41
        host.wait_until_idle()


def test_limits(keeping, monkeypatch):
    looking, unfinished = threading.Lock(), BatchStore.unfinished

    def look(self):
        with looking:
            return unfinished(self)

    monkeypatch.setattr(BatchStore, "unfinished", look)
    with keeping(max_batch_lines=2, max_batches=1, max_batch_file_bytes=2000) as server:
        client = client_of(server)
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=("a", b"x" * 2001), purpose="batch")
        assert caught.value.status_code == 413
        for lines, code in (
            ([line(f"{n}", HELLO) for n in range(3)], "too_many_requests"),
            (["", ""], "empty_file"),
        ):
            file = upload(client, *lines)
            with looking:  # the first one has not ended when the second one comes
                batch = client.batches.create(input_file_id=file, endpoint=CHAT, **WINDOW)
                with pytest.raises(openai.BadRequestError, match="--max-batches"):
                    client.batches.create(input_file_id=file, endpoint=CHAT, **WINDOW)
            while batch.status != "failed":
                time.sleep(0.1)
                batch = client.batches.retrieve(batch.id)
            assert [one.code for one in batch.errors.data] == [code]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {str(n): "a" for n in range(17)}}, "metadata"),
        ({"extra_body": {"output_expires_after": {}}}, "output_expires_after"),
    ],
)
def test_what_is_wrong_is_refused_by_name(keeping, changes, param):
    with keeping() as server:
        client = client_of(server)
        body = {"endpoint": CHAT, "input_file_id": upload(client, "{}"), **WINDOW}
        with pytest.raises(openai.APIStatusError) as caught:
            client.batches.create(**body | changes)
        assert caught.value.param == param
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.create(file=("a", b"{}"), purpose="fine-tune")
        assert caught.value.param == "purpose"
        for name, value in {"limit": "0", "order": "up", "before": "x"}.items():
            answer = server.get(
                "/v1/files", params={name: value}, headers={"Authorization": "Bearer a"}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_a_server_without_a_directory_says_so(server, url):
    with openai.OpenAI(base_url=url, api_key="a-key", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="--batch-dir"):
            client.files.create(file=("a", b"{}"), purpose="batch")
