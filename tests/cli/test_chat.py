"""`jaxllm chat`: a conversation in process, through a pipe and at a terminal."""

import io
import os
import select
import subprocess
import sys
import threading

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.cli.conversation import Conversation, converse
from jaxllm.cli.local_model import LocalModel
from jaxllm.cli.main import main
from jaxllm.errors import ValidationError
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12)
GO_ON = threading.Event()  # never set


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("cli") / "model"))


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    return LLM(model, **TINY)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer_to(llm: LLM, messages: list[dict[str, str]]) -> str:
    return llm.chat(messages, PARAMS, use_tqdm=False)[0].outputs[0].text


def test_streamed_pieces_add_up_to_the_answer(llm):
    pieces = list(Conversation(LocalModel(llm.llm_engine, PARAMS)).reply("Hello", GO_ON))
    assert len(pieces) > 3
    assert "".join(pieces) == answer_to(llm, [user("Hello")])


def test_a_second_line_continues_the_conversation(llm):
    chat = Conversation(LocalModel(llm.llm_engine, PARAMS), "Be brief.")
    first = "".join(chat.reply("Hello", GO_ON))
    second = "".join(chat.reply("And then?", GO_ON))
    history = [
        {"role": "system", "content": "Be brief."},
        user("Hello"),
        {"role": "assistant", "content": first},
        user("And then?"),
    ]
    assert second == answer_to(llm, history)


def test_reset_forgets_the_conversation_but_not_the_system_prompt(llm):
    chat = Conversation(LocalModel(llm.llm_engine, PARAMS), "Be brief.")
    first = list(chat.reply("Hello", GO_ON))
    list(chat.reply("And then?", GO_ON))
    chat.reset()
    assert list(chat.reply("Hello", GO_ON)) == first


def test_stop_ends_the_answer_and_keeps_what_came_of_it(llm):
    chat = Conversation(LocalModel(llm.llm_engine, PARAMS.clone(max_tokens=100)))
    stop = threading.Event()
    stream = chat.reply("Hello", stop)
    pieces = [next(stream), next(stream)]
    stop.set()
    pieces += stream
    assert len(pieces) < 20
    assert not llm.llm_engine.has_unfinished_requests()
    assert chat.turns == [("Hello", "".join(pieces))]
    assert "".join(chat.reply("Go on", GO_ON))


def test_oldest_turns_are_forgotten_when_the_context_is_full(llm, capsys):
    chat = Conversation(LocalModel(llm.llm_engine, PARAMS))
    for number in range(10):
        assert "".join(chat.reply(f"This is line number {number}.", GO_ON))
    assert 0 < len(chat.turns) < 10
    assert chat.turns[-1][0] == "This is line number 9."
    assert "turns are forgotten" in capsys.readouterr().err


def test_a_line_too_long_is_refused_and_costs_no_history(llm):
    chat = Conversation(LocalModel(llm.llm_engine, PARAMS))
    list(chat.reply("Hello", GO_ON))
    before = chat.turns
    with pytest.raises(ValidationError, match="max_model_len"):
        list(chat.reply("word " * 300, GO_ON))
    assert chat.turns == before
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_template_that_does_not_fit_is_refused_at_once(llm):
    model = LocalModel(llm.llm_engine, PARAMS, chat_template="{{ raise_exception('no') }}")
    with pytest.raises(ValidationError, match="chat template refuses"):
        Conversation(model)


def test_a_pipe_gets_answers_only(llm, monkeypatch, capsys):
    lines = "Hello\n\n/help\n/reset\n/nonsense\nHello\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    converse(Conversation(LocalModel(llm.llm_engine, PARAMS)))
    captured = capsys.readouterr()
    answer = answer_to(llm, [user("Hello")])
    assert captured.out == f"{answer}\n{answer}\n"
    assert "/reset" in captured.err
    assert "no command '/nonsense'" in captured.err


def test_input_that_is_not_utf8_is_refused(llm, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with pytest.raises(ValidationError, match="standard input: not UTF-8"):
        converse(Conversation(LocalModel(llm.llm_engine, PARAMS)))


def test_template_that_is_not_utf8_is_refused(tmp_path, capsys):
    path = tmp_path / "template.jinja"
    path.write_bytes(b"\xff")
    assert main(["chat", "m", "--chat-template", str(path)]) == 2
    assert f"jaxllm: error: {path}: not UTF-8" in capsys.readouterr().err


def test_exit_leaves_the_rest_of_the_input(llm, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("/exit\nHello\n"))
    converse(Conversation(LocalModel(llm.llm_engine, PARAMS)))
    assert capsys.readouterr().out == ""


class Terminal:
    """A process that believes it has a terminal; what it shows is in `shown`."""

    def __init__(self, *argv: str):
        # pty.spawn passes our bytes on through a terminal, which makes a signal of Ctrl-C. That
        # signal is ignored in what a shell runs in the background, as these tests may be.
        code = (
            "import os, pty, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
            "sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.shown = ""

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self.process.stdin.fileno(), text.encode())

    def wait_for(self, text: str, *, more: int = 0) -> None:
        """Read until `text` and `more` characters after it have been shown."""
        while text not in self.shown or len(self.shown.split(text, 1)[1]) < more:
            assert self._read(timeout=300), f"nothing more came after {self.shown!r}"

    def press_until(self, key: str, text: str) -> None:
        """Press a key until `text` is shown: Python loses a Ctrl-C that comes in the moment between
        the prompt and the waiting for input."""
        for _ in range(20):
            self.type(key)
            while text not in self.shown and self._read(timeout=5):
                pass
            if text in self.shown:
                return
        raise AssertionError(f"{text!r} was not shown, only {self.shown!r}")

    def _read(self, timeout: float) -> bool:
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        if ready:
            data = os.read(self.process.stdout.fileno(), 4096)
            assert data, f"ended after {self.shown!r}"
            self.shown += data.decode(errors="replace")
        return bool(ready)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        # Its terminal closes with it, which ends the command, too.
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
def test_interrupt_stops_the_answer_and_not_the_program(model):
    flags = "--ignore-eos --enforce-eager --max-model-len 2K --num-gpu-blocks-override 256".split()
    with Terminal(sys.executable, "-m", "jaxllm.cli.main", "chat", model, *flags) as terminal:
        terminal.wait_for(">>> ")
        for _ in range(2):
            terminal.type("Hello\n")
            terminal.wait_for("Hello\r\n", more=10)
            terminal.type("\x03")
            terminal.wait_for(">>> ")
            assert "longest length" not in terminal.shown
        terminal.press_until("\x03", "/exit leaves")
        terminal.wait_for(">>> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=300) == 0
