"""Where a server's key comes from: a flag, a file, the environment, or a person."""

import getpass

import pytest

from jaxllm.cli.api_key import with_api_key
from jaxllm.errors import JaxLLMError, UnauthorizedError, ValidationError


def ask(wanted, key=None, file=None):
    """The keys that a server is shown which takes this one alone."""
    shown = []

    def work(key):
        shown.append(key)
        if key != wanted:
            raise UnauthorizedError("http://a: a key is needed")

    with_api_key(key, file, work)
    return shown


@pytest.fixture
def terminal(monkeypatch):
    """Somebody sits there, who types these."""
    typed = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(getpass, "getpass", lambda prompt, stream: typed.pop())
    return typed


def test_a_flag_goes_before_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    assert ask("of the environment") == ["of the environment"]
    assert ask("flag", key="flag") == ["flag"]
    file = tmp_path / "key"
    file.write_text("of-a-file\n")
    assert ask("of-a-file", file=str(file)) == ["of-a-file"]
    with pytest.raises(ValidationError, match="give one of them"):
        ask("flag", key="flag", file=str(file))
    monkeypatch.setenv("OPENAI_API_KEY", "")
    assert ask(None) == [None]


@pytest.mark.parametrize(
    ("text", "message"), [(b"", "0 keys"), (b"a\nb", "2"), (b"\xff", "byte 0")]
)
def test_a_file_without_the_key_is_refused(text, message, tmp_path):
    file = tmp_path / "key"
    file.write_bytes(text)
    with pytest.raises(ValidationError, match=message):
        ask("a", file=str(file))


def test_in_a_pipe_nobody_is_asked_and_the_flags_are_named(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(getpass, "getpass", lambda *_: pytest.fail("nobody sits there"))
    with pytest.raises(JaxLLMError, match="needed; give --api-key-file FILE or --api-key KEY, or"):
        ask("secret")


def test_a_person_is_asked_once(terminal, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    terminal.append(" secret ")
    assert ask("secret") == [None, "secret"]
    terminal.append("wrong")
    with pytest.raises(JaxLLMError, match="--api-key-file"):
        ask("secret")
