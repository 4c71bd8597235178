"""`jaxllm run-batch` on a tiny model: what it reads, writes and refuses."""

import fcntl
import importlib.util
import json
import os

import fsspec
import pytest

from jaxllm import LLM, SamplingParams

pytestmark = pytest.mark.slow  # whichever is first compiles

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 3}


def chat(custom_id, content="Hi", **body):
    messages = [{"role": "user", "content": content}]
    return openai(custom_id, "/v1/chat/completions", messages=messages, **body)


def openai(custom_id, url="/v1/completions", **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**GREEDY, **body}}


def respond(custom_id, **body):
    asked = {"input": "Hi", "max_output_tokens": 3, "temperature": 0, "ignore_eos": True}
    return openai(custom_id, "/v1/responses") | {"body": {**asked, **body}}


def plain(prompt="One", **fields):
    return {"prompt": prompt, **GREEDY, **fields}


def test_each_line_has_one_result_in_its_own_form(bench, engine_options):
    bench.write(
        chat("a"),
        openai("b", prompt="One two"),
        plain("Hello", custom_id="c", n=1),
        b"",
        {"prompt_token_ids": [70, 71], **GREEDY},
        respond("d"),
    )
    assert bench.run() == 0
    assert bench.errors() == []
    by_id = {one["custom_id"]: one for one in bench.answers()}
    llm = LLM(**engine_options)
    params = SamplingParams(**GREEDY)
    expected = llm.generate(["One two", "Hello", [70, 71]], params, use_tqdm=False)
    assert by_id["a"].keys() == {"id", "custom_id", "response", "error"}
    assert by_id["a"]["error"] is None
    response = by_id["a"]["response"]
    assert response["status_code"] == 200
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    assert response["body"]["choices"][0]["message"]["content"] == output.outputs[0].text
    body = by_id["d"]["response"]["body"]
    assert (body["object"], body["store"], body["usage"]["output_tokens"]) == ("response", False, 3)
    assert body["output"][0]["content"][0]["text"] == output.outputs[0].text
    assert by_id["b"]["response"]["body"]["choices"][0]["text"] == expected[0].outputs[0].text
    assert len({by_id[one]["response"]["request_id"] for one in "ab"}) == 2
    assert by_id["c"]["line"] == 3
    assert by_id["c"]["outputs"][0]["text"] == expected[1].outputs[0].text
    assert by_id[None]["line"] == 5
    assert by_id[None]["prompt_token_ids"] == [70, 71]
    assert by_id[None]["outputs"][0]["token_ids"] == expected[2].outputs[0].token_ids


BAD_LINES = [
    (b"not json", "invalid_json", "line 1: not JSON"),
    (b"[" * 3000, "invalid_json", "line 1: not JSON"),
    (b'{"prompt": "caf\xe9"}', "invalid_line", "line 1: not UTF-8 at byte 15"),
    (b'"' + b"x" * 5000 + b'"', "invalid_line", "at most --max-line-bytes=4000"),
    (b'{"prompt": "\\ud800"}', "invalid_json", "line 1: not JSON"),
    (["prompt"], "invalid_line", "an object with 'custom_id', 'method', 'url' and 'body'"),
    ({"url": "/v1/completions", "body": {}}, "invalid_line", "an object with 'custom_id'"),
    (openai(7, prompt="x"), "invalid_line", "'custom_id' must be a string"),
]
BAD_REQUESTS = [
    (openai("x", "/v1/embeddings", input="x"), 404, "url='/v1/embeddings' is not served here"),
    (openai("x", prompt="x") | {"method": "GET"}, 400, "method='GET': it must be 'POST'"),
    (openai("x", prompt="x") | {"extra": 1}, 400, "a batch line has no such fields"),
    (openai("x", prompt="x") | {"body": None}, 400, "body=None: it must be a JSON object"),
    (openai("x", prompt="x", model="other"), 404, "model='other' is not served here"),
    (openai("x", prompt="x", tools=[{}]), 400, "tools=[{}]: not supported"),
    (openai("x", prompt="x " * 100), 400, "the prompt has"),
    (openai("x", prompt=[[5], [10**9]]), 400, "prompt[1]=1000000000: no such token"),
    (chat("x", content=3), 400, "messages[0].content=3: it must be text"),
    (respond("x", store=True), 400, "store=True: nothing is stored here; the responses of a"),
    (respond("x", background=True), 400, "background=True: it is read where it is stored"),
    (respond("x", stream=True), 400, "stream=True: not supported"),
    (respond("x", tools=[{"type": "web_search"}]), 400, "tools[0].type='web_search': only"),
    (chat("x", temperature=1001), 400, "temperature=1001.0: it must be"),
]
BAD_PLAIN = [
    (plain(max_tokns=3), "max_tokns=3: there is no such field; did you mean 'max_tokens'?"),
    (plain(prompt=None), "prompt=None: it must be a string"),
    (plain(output_kind=1), "output_kind=1: there is no such field"),
    (plain(stop={"a": 1}), "stop={'a': 1}: it must be a list"),
    (plain(priority=3), "priority=3: the engine serves first come, first served"),
]


def test_bad_lines_are_errors_of_their_own(bench):
    """Each among good ones, which it does not harm."""
    num_bad = len(BAD_LINES + BAD_REQUESTS + BAD_PLAIN)
    lines = []
    for number, (line, *_) in enumerate(BAD_LINES + BAD_REQUESTS + BAD_PLAIN):
        if isinstance(line, dict) and line.get("custom_id") == "x":
            line = line | {"custom_id": f"bad-{number}"}
        lines += [line, openai(f"good-{number}", prompt="x")]
    bench.write(*lines)
    assert bench.run("--ordered", "--max-line-bytes=4000") == 0
    assert [one["custom_id"] for one in bench.answers()] == [f"good-{i}" for i in range(num_bad)]
    errors = iter(bench.errors())
    for number, (_, code, message) in enumerate(BAD_LINES):
        error = next(errors)
        assert error["response"] is None
        assert error["error"]["code"] == code
        assert message.replace("line 1:", f"line {2 * number + 1}:") in error["error"]["message"]
    for number, (_, status, message) in enumerate(BAD_REQUESTS, len(BAD_LINES)):
        error = next(errors)
        assert error["custom_id"] == f"bad-{number}"
        assert error["response"]["status_code"] == status
        assert message in error["response"]["body"]["error"]["message"]
    for (_, message), error in zip(BAD_PLAIN, errors, strict=True):
        assert message in error["error"]["message"]


def test_the_first_of_several_lines_with_one_custom_id_is_the_good_one(bench):
    bench.write(openai("a", prompt="x"), openai("b", prompt="x"), openai("a", prompt="y"))
    assert bench.run("--error-file", str(bench.output) + ".bad") == 0
    assert sorted(one["custom_id"] for one in bench.answers()) == ["a", "b"]
    (error,) = map(json.loads, open(str(bench.output) + ".bad"))
    assert error["custom_id"] == "a"
    assert error["error"]["code"] == "duplicate_custom_id"
    assert "line 3: custom_id 'a' is on an earlier line, too" in error["error"]["message"]


def test_answers_and_errors_need_files_of_their_own(bench, tmp_path, capsys):
    bench.write(plain(), plain(bogus=1))
    (tmp_path / "link.jsonl").symlink_to(bench.output)
    around = tmp_path / ".." / tmp_path.name / "out.jsonl"
    for name in (bench.output, around, tmp_path / "link.jsonl"):
        assert bench.run("--error-file", str(name), "--ordered") == 2
        assert "it is the output, too" in capsys.readouterr().err
    assert not bench.journal.exists()


def test_a_finished_batch_is_not_run_again(bench, capsys):
    bench.write(plain())
    assert bench.run("--ordered") == 0
    before = bench.output.read_bytes()
    # So many devices are not here: nothing is loaded.
    assert bench.run("--ordered", "--tensor-parallel-size=512") == 0
    assert bench.output.read_bytes() == before
    os.unlink(bench.output)
    assert bench.run("--ordered") == 2
    err = capsys.readouterr().err
    assert "out.jsonl was written by an earlier run and is not there any more; delete" in err


def test_only_the_same_batch_is_gone_on_with(bench, capsys):
    bench.write(plain(), plain())
    assert bench.run() == 0

    def refusal(*more):
        assert bench.run(*more) == 2
        return capsys.readouterr().err

    begun = "this batch was begun with something else: "
    refused = refusal("--dtype=bfloat16")
    assert begun + "dtype was 'float32' and is 'bfloat16'. Give what it" in refused
    assert "ordered was False and is True" in refusal("--ordered")
    assert begun + "reasoning_parser was None and" in refusal("--reasoning-parser=qwen3")
    assert begun + "model was" in refusal("--model=/another/model")
    bench.write(plain(), plain("Two"))
    assert begun + "the content of the input is another" in refusal()
    bench.write(plain())
    assert begun + "the input had" in refusal()


def test_a_run_that_brought_nothing_binds_nobody(bench):
    bench.write(plain())
    assert bench.run("--model=/no/such/model") == 2
    bench.write(plain(), plain())
    assert bench.run() == 0
    assert len(bench.answers()) == 2


def test_killed_in_its_very_first_commit_a_batch_goes_on(bench):
    """The results are there, and the journal does not know of them yet."""
    bench.write(plain(), plain())
    assert bench.run("--tensor-parallel-size=512") == 2
    bench.output.write_text('{"line": 2, "outp')
    assert bench.run() == 0
    assert sorted(one["line"] for one in bench.answers()) == [1, 2]


def test_two_processes_do_not_share_a_batch(bench, capsys):
    bench.write(plain())
    bench.journal.mkdir()
    with open(bench.journal / "lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert bench.run() == 2
    assert "another process is at work on this batch" in capsys.readouterr().err
    assert bench.run() == 0


def test_remote_files_are_read_and_uploaded(bench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    memory = fsspec.filesystem("memory")
    lines = [plain(), {"prompt": 3}, plain(n=2, temperature=1)]
    memory.pipe("/bucket/in.jsonl", "\n".join(map(json.dumps, lines)).encode())
    bench.argv[2:5:2] = ["memory://bucket/in.jsonl", "memory://bucket/out.jsonl"]
    assert bench.run() == 0
    answers = [json.loads(line) for line in memory.cat("/bucket/out.jsonl").splitlines()]
    assert sorted(one["line"] for one in answers) == [1, 3]
    (error,) = map(json.loads, memory.cat("/bucket/out.errors.jsonl").splitlines())
    assert error["line"] == 2
    # No more objects than these, and of the results no second copy here.
    assert len(memory.ls("/bucket")) == 3
    assert sorted(os.listdir("out.jsonl.journal")) == ["journal", "lock", "manifest.json"]
    memory.rm("/bucket", recursive=True)


def test_a_failed_upload_is_repeated_without_a_model(bench, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError("quota")

    monkeypatch.chdir(tmp_path)
    memory = fsspec.filesystem("memory")
    bench.write(plain(), plain())
    bench.argv[4] = "memory://elsewhere/out.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(type(memory), "put_file", refuse)
        assert bench.run() == 2
    err = capsys.readouterr().err
    assert "memory://elsewhere/out.jsonl cannot be written: quota. All results are in " in err
    # So many devices are not here.
    assert bench.run("--tensor-parallel-size=512") == 0
    assert len(memory.cat("/elsewhere/out.jsonl").splitlines()) == 2
    memory.rm("/elsewhere", recursive=True)


class TestRefusedBeforeTheModelIsLoaded:
    """There is no such model, which would be the answer if it were looked for."""

    @pytest.fixture
    def bench(self, bench):
        bench.argv.append("--model=/no/such/model")
        bench.write(plain())
        return bench

    def refusal(self, bench, capsys, *more):
        assert bench.run(*more) == 2
        return capsys.readouterr().err

    def test_input(self, bench, capsys):
        os.unlink(bench.input)
        assert "in.jsonl: no such file; check the path" in self.refusal(bench, capsys)

    def test_input_that_can_be_read_once(self, bench, capsys):
        err = self.refusal(bench, capsys, "-i", "/dev/null")
        assert "/dev/null is not a regular file; give one that can be reread" in err

    def test_output_in_no_directory(self, bench, capsys):
        err = self.refusal(bench, capsys, "-o", "/no/such/out.jsonl")
        assert "/no/such/out.jsonl: there is no directory /no/such; make it" in err

    def test_output_that_is_no_file(self, bench, capsys):
        assert "/dev/full is not a regular file" in self.refusal(bench, capsys, "-o", "/dev/full")

    def test_output_that_exists(self, bench, capsys):
        bench.output.write_text("precious")
        err = self.refusal(bench, capsys)
        assert "out.jsonl exists, and" in err
        assert "move it away, or give another output" in err
        assert bench.output.read_text() == "precious"

    def test_one_file_for_both(self, bench, capsys):
        err = self.refusal(bench, capsys, "--error-file", str(bench.output))
        assert "it is the output, too; give another" in err

    def test_a_missing_package(self, bench, capsys):
        if importlib.util.find_spec("gcsfs"):
            pytest.skip("gcsfs is installed")
        err = self.refusal(bench, capsys, "-o", "gs://bucket/out.jsonl")
        assert "gs:// needs a package that is missing; install jaxllm[gcs]" in err

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--grace-period=-1", "grace_period_s=-1.0: it must be a finite number of at least 0"),
            ("--price-per-hour=nan", "price_per_hour=nan: it must be"),
            ("--max-line-bytes=0", "max_line_bytes=0: it must be"),
            ("--max-num-seqs=0", "max_num_seqs=0 is too small"),
            ("--chat-template=/no/such", "/no/such: No such file"),
            ("--tool-call-parser=hermes", "enable_auto_tool_choice and tool_call_parser need"),
            ("--reasoning-parser=none", "reasoning_parser='none': use one of"),
        ],
    )
    def test_flags(self, bench, capsys, flag, message):
        assert message in self.refusal(bench, capsys, flag)
