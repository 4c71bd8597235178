"""The API key for a server: from a flag, a file, the environment, or a prompt on the terminal."""

import getpass
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from jaxllm.errors import UnauthorizedError, ValidationError
from jaxllm.files import read_given_text
from jaxllm.plural import counted

Result = TypeVar("Result")

# OpenAI's own clients read this variable, so it is set wherever they use another server.
_VARIABLE = "OPENAI_API_KEY"
_FLAGS = f"give --api-key-file FILE or --api-key KEY, or set {_VARIABLE}"


def with_api_key(key: str | None, file: str | None, work: Callable[[str | None], Result]) -> Result:
    """Run `work` with the given key. If the server refuses it, ask a user at a terminal for a key;
    otherwise raise an error that says how to give one."""
    key = _given(key, file)
    try:
        return work(key)
    except UnauthorizedError as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise _with_remedy(error) from None
        print(f"{error}", file=sys.stderr)
        asked = getpass.getpass("API key: ", stream=sys.stderr).strip()
    try:
        return work(asked)
    except UnauthorizedError as error:
        raise _with_remedy(error) from None


def _given(key: str | None, file: str | None) -> str | None:
    if key is not None and file is not None:
        raise ValidationError("--api-key and --api-key-file: give one of them")
    if file is None:
        return key if key is not None else os.environ.get(_VARIABLE) or None
    lines = read_given_text(file).split()
    if len(lines) != 1:
        raise ValidationError(
            f"{file}: it has {counted(len(lines), 'key')}; one is wanted, on a line alone"
        )
    return lines[0]


def _with_remedy(error: UnauthorizedError) -> UnauthorizedError:
    return UnauthorizedError(f"{error}; {_FLAGS}")
