"""The command as a user meets it: as a process with an exit status and one line of error."""

import os
import signal
import subprocess
import sys

import pytest

import jaxllm
from jaxllm.cli.main import COMMANDS, main

# A background job of a shell inherits ignored interrupts; a command at a terminal does not.
AT_A_TERMINAL = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from jaxllm.cli.main import main; sys.exit(main())"
)


def jaxllm_process(*argv: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", AT_A_TERMINAL, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("argv", [["--help"], ["-h"], []])
def test_help_names_every_command(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in out
        assert command.summary in out


@pytest.mark.parametrize("argv", [["bench"], ["bench", "--help"]])
def test_half_a_command_shows_its_other_halves(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert COMMANDS["bench serve"].summary in out
    assert COMMANDS["generate"].summary not in out


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_version(flag, capsys):
    assert main([flag]) == 0
    assert capsys.readouterr().out == f"jaxllm {jaxllm.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["frobnicate"], "unknown command 'frobnicate'; the commands are generate, chat"),
        (["bench", "frobnicate"], "unknown command 'bench frobnicate'; the commands are"),
        (["bench", "serve", "now"], "unknown argument 'now'"),
        (["generate"], "no prompts; give --prompt"),
        (["generate", "m"], "no prompts; give --prompt"),
        (["generate", "m", "--prompts-file", "/no/such"], "/no/such: No such file or directory"),
        (["generate", "m", "--prompt", "x", "--temperature", "-1"], "temperature=-1.0: it must be"),
        (["chat", "m", "--n", "2"], "unknown argument '--n'"),
        (["collect-env", "now"], "unknown argument 'now'"),
    ],
)
def test_errors_are_one_line_and_status_2(argv, message, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxllm: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_debug_adds_the_traceback(capsys):
    assert main(["generate", "m", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.endswith("jaxllm: error: no prompts; give --prompt TEXT or --prompts-file FILE\n")


def test_a_bug_is_not_hidden_behind_one_line(monkeypatch):
    monkeypatch.setitem(COMMANDS, "collect-env", COMMANDS["generate"]._replace(module="antigravty"))
    with pytest.raises(ModuleNotFoundError):
        main(["collect-env"])


def test_interrupt_ends_quietly_with_status_130(tmp_path):
    fifo = tmp_path / "prompts"
    os.mkfifo(fifo)
    process = jaxllm_process("generate", "m", "--prompts-file", str(fifo))
    with open(fifo, "w"):  # returns when the command has opened the other end
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (130, "", "")


def test_closed_pipe_is_quiet():
    process = jaxllm_process("collect-env")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141
