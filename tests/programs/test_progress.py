"""Those who wait for a compilation hear how far it is, and a terminal alone gets a bar."""

import io
import logging

import pytest

from jaxllm.programs.progress import CompileProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def compile_two_of_three(progress):
    with progress:
        for key in ("decode 4x4", "mixed 16x4"):
            with progress.compiling(key):
                pass
        with progress.compiling("the last"):
            progress.tell()


def test_without_a_terminal_there_are_lines(caplog, capfd):
    compile_two_of_three(CompileProgress(3))
    first, second = caplog.messages
    assert first == "compiling 0 of 3 programs, 0 s"
    assert second == "compiling 2 of 3 programs, 0 s; under way: the last"
    assert capfd.readouterr().out == ""


def test_on_a_terminal_there_is_a_bar(monkeypatch, caplog, capsys):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    compile_two_of_three(CompileProgress(4, done=1))
    assert "compiling: 3/4 programs" in terminal.getvalue() and "the last" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")  # it is taken away
    assert not caplog.messages and capsys.readouterr().out == ""


@pytest.mark.parametrize(("done", "level"), [(3, "INFO"), (0, "WARNING")])
def test_where_there_is_nothing_to_do_or_nothing_to_tell_it_is_silent(
    done, level, monkeypatch, caplog
):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    logger = logging.getLogger("jaxllm.programs.progress")
    before = logger.level
    logger.setLevel(level)
    try:
        with CompileProgress(3, done):
            pass
    finally:
        logger.setLevel(before)
    assert terminal.getvalue() == "" and not caplog.messages
