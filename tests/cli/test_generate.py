"""`jaxllm generate` on a tiny model: what it reads, what it prints."""

import argparse
import io
import json
import os

import pytest
from jax.profiler import ProfileData

from jaxllm import LLM, SamplingParams
from jaxllm.cli.generate import form_from, read_prompts
from jaxllm.cli.main import main
from jaxllm.errors import ValidationError
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY, as_flags

ENGINE = as_flags(TINY)
GREEDY = ["--temperature", "0", "--ignore-eos", "--max-tokens", "5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("cli") / "model"))


@pytest.fixture(scope="module")
def expected(model) -> list[str]:
    """Greedy answers of the library to the two prompts of these tests."""
    llm = LLM(model, **TINY)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=5)
    outputs = llm.generate(["Hello, how", "One two"], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_text_comes_after_its_prompt(model, expected, capsys):
    argv = ["generate", model, "--prompt", "Hello, how", "--prompt", "One two", *GREEDY, *ENGINE]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out == f"Hello, how{expected[0]}\n\nOne two{expected[1]}\n"


def test_json_has_one_line_per_answer_with_all_that_was_asked_for(
    model, expected, tmp_path, capsys
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"Hello, how"\n\n{"prompt": "One two"}\n{"prompt_token_ids": [70, 71]}\n')
    argv = ["generate", "--model", model, "--prompts-file", str(prompts), "--json"]
    assert main([*argv, "--logprobs", "2", "--prompt-logprobs", "1", *GREEDY, *ENGINE]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt"] for record in records] == ["Hello, how", "One two", None]
    assert [record["text"] for record in records[:2]] == expected
    assert records[2]["prompt_token_ids"] == [70, 71]
    for record in records:
        assert record["finish_reason"] == "length"
        assert record["stop_reason"] is None
        assert len(record["token_ids"]) == len(record["logprobs"]) == 5
        assert record["prompt_logprobs"][0] is None
        assert record["metrics"]["num_generation_tokens"] == 5
        for token, entries in zip(record["token_ids"], record["logprobs"], strict=True):
            assert entries[str(token)]["rank"] == 1


def test_a_run_is_profiled_if_there_is_where_to(model, tmp_path, capsys):
    main(["generate", model, "--prompt", "One two", f"--profile-dir={tmp_path}", *ENGINE, *GREEDY])
    (path,) = tmp_path.rglob("*.xplane.pb")
    lines = [line for plane in ProfileData.from_file(str(path)).planes for line in plane.lines]
    assert sum(event.name == "step" for line in lines for event in line.events) == 5


def test_json_has_no_logprobs_that_nobody_asked_for(model, capsys):
    argv = ["generate", model, "--prompt", "One two", "--json", "--n", "2", "--max-tokens", "2"]
    assert main([*argv, *ENGINE]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["index"] for record in records] == [0, 1]
    assert not records[0].keys() & {"logprobs", "cumulative_logprob", "prompt_logprobs"}


def test_defaults_come_from_the_model_and_flags_override_them(tmp_path, capsys):
    model = make_tiny_checkpoint(tmp_path)
    recommended = {"eos_token_id": 0, "temperature": 0.0, "max_new_tokens": 3}
    (model / "generation_config.json").write_text(json.dumps(recommended))
    argv = ["generate", str(model), "--prompt", "One two", "--json", "--ignore-eos", *ENGINE]
    assert main(argv) == 0
    assert main([*argv, "--max-tokens", "6"]) == 0
    short, long = [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]
    assert (len(short), len(long)) == (3, 6)
    assert long[:3] == short


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "word " * 200], "max_model_len"),
        (["--prompt", "x", "--allowed-token-ids", "100000"], "allowed_token_ids"),
        (["--prompt", "x", "--logprobs", "30"], "max_logprobs"),
    ],
)
def test_a_bad_request_is_one_line_after_the_model_is_loaded(model, flags, message, capsys):
    capsys.readouterr()
    assert main(["generate", model, *flags, *ENGINE]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("jaxllm: error: ")]
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in captured.err


def test_a_model_that_does_not_exist_is_one_line(tmp_path, capsys):
    assert main(["generate", str(tmp_path / "none"), "--prompt", "x"]) == 2
    err = capsys.readouterr().err
    assert err.count("jaxllm: error: ") == 1
    assert "none" in err and "Traceback" not in err


def test_text_file_is_one_prompt_per_line_without_empty_ones(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("Grüße\n\n  \n[1, 2]\n", encoding="utf-8")
    assert prompts_of(path) == ["Grüße", "[1, 2]"]


def prompts_of(path):
    return [one.prompt for one in read_prompts(str(path))]


def test_prompts_may_come_through_a_pipe():
    read_end, write_end = os.pipe()  # what a shell makes of <(...)
    with os.fdopen(write_end, "w") as writer:
        writer.write("one\ntwo\n")
    assert prompts_of(f"/dev/fd/{read_end}") == ["one", "two"]
    os.close(read_end)


def test_only_line_feeds_end_a_prompt(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("a\fb\x85c\u2028d\re\r\n\r\ntwo".encode())
    assert prompts_of(path) == ["a\fb\x85c\u2028d\re", "two"]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('"a\x85b\u2028c"\r\n"two"\n'.encode())
    assert prompts_of(path) == ["a\x85b\u2028c", "two"]


def test_a_refused_prompt_is_named_by_its_line(model, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("fine\n\n" + "word " * 200)
    assert main(["generate", model, "--prompts-file", str(path), *ENGINE]) == 2
    assert f"jaxllm: error: {path}:3: the prompt has" in capsys.readouterr().err
    path.write_text("\n" + "word " * 200)
    assert main(["generate", model, "--prompts-file", str(path), *ENGINE]) == 2
    assert f"jaxllm: error: {path}:2: the prompt has" in capsys.readouterr().err


def test_what_the_output_cannot_show_is_replaced(model, expected, monkeypatch):
    data = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(data, encoding="ascii"))
    assert main(["generate", model, "--prompt", "Grüße", *GREEDY, *ENGINE]) == 0
    assert data.getvalue().startswith(b"Gr??e")


BROKEN = """
from jaxllm import LogitsProcessor

class Broken(LogitsProcessor):
    def encode(self, params):
        return () if params.extra_args else None

    def apply(self, logits, params, output_index):
        return logits[0]
"""


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Flags for a logits processor with which every step fails."""
    (tmp_path / "broken_processor.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    return ["--logits-processors", "broken_processor:Broken", "--extra-args", '{"x": 1}']


def test_answers_that_end_in_an_error_are_shown_and_not_a_success(model, broken, capsys):
    argv = ["generate", model, "--prompt", "Hello", "--json", *broken, *ENGINE]
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["finish_reason"] == "error"
    [line] = [line for line in captured.err.splitlines() if line.startswith("jaxllm: error: ")]
    assert "1 answer ended in an error" in line and "Broken.apply must return" in line


def test_a_chat_through_a_pipe_tells_of_lines_without_an_answer(model, broken, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["chat", model, *broken, *ENGINE]) == 2
    err = capsys.readouterr().err
    assert "the answer ended in an error" in err and "jaxllm: error: 1 line had no answer" in err
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 300 + "\nHello\n"))
    assert main(["chat", model, "--max-tokens", "2", *ENGINE]) == 2
    captured = capsys.readouterr()
    assert "jaxllm: error: 1 line had no answer" in captured.err and captured.out.strip()


def test_dash_is_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\r\ntwo\n")))
    assert read_prompts("-") == [("-:1", "one"), ("-:2", "two")]


@pytest.mark.parametrize(
    "line",
    ["{", "7", "[1, 2]", '{"text": "x"}', "null", "1" * 5000, "[" * 100_000],
    ids=lambda line: line[:12],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    with pytest.raises(ValidationError, match=r"prompts\.jsonl:2: "):
        read_prompts(str(path))


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValidationError, match="not UTF-8"):
        read_prompts(str(path))


SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], \
"additionalProperties": false}'


def test_answers_have_the_form_of_the_flags(model, tmp_path, capsys):
    file = tmp_path / "form"
    file.write_text(SCHEMA)
    form = ["--json-schema", str(file), "--max-tokens", "100"]
    assert main(["generate", model, "--prompt", "Hi", "--json", *form, *ENGINE]) == 0
    record = json.loads(capsys.readouterr().out)
    assert json.loads(record["text"])["a"] in (1, 2) and record["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("flags", "kind", "value"),
    [
        ({"json_schema": "form"}, "json", SCHEMA),
        ({"regex": "[0-9]"}, "regex", "[0-9]"),
        ({"choice": ["yes", "no"]}, "choice", ["yes", "no"]),
        ({"grammar": "form"}, "grammar", SCHEMA),
    ],
)
def test_each_flag_is_a_kind_of_form(flags, kind, value, tmp_path):
    file = tmp_path / "form"
    file.write_text(SCHEMA)
    given = {"json_schema": None, "regex": None, "choice": [], "grammar": None} | flags
    given = {name: str(file) if one == "form" else one for name, one in given.items()}
    form = form_from(argparse.Namespace(**given))
    assert form is not None and form.kind == kind and getattr(form, kind) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--regex", "a", "--choice", "b"], "exactly one of"),
        (["--regex", ""], "--regex=''"),
        (["--json-schema", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_wrong_forms_are_refused_before_the_model_is_loaded(flags, message, capsys):
    assert main(["generate", "no-model", "--prompt", "Hi", *flags]) == 2
    assert message in capsys.readouterr().err
