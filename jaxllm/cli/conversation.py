"""A conversation in the terminal: lines in, answers out, wherever the model is.

The same loop serves a person and a pipe; only a person gets a prompt sign. Standard output
carries the answers alone, everything else goes to standard error.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Protocol

from jaxllm.errors import JaxLLMError, not_utf8
from jaxllm.plural import counted

Message = dict[str, str]  # role and content, as chat templates and servers take it

HELP = """\
/reset   forget the conversation
/help    show this
/exit    leave; so does Ctrl-D
Ctrl-C   stop the answer"""


class Replier(Protocol):
    """Who answers a line."""

    def reset(self) -> None:
        """Forget all lines before."""
        ...

    def reply(self, said: str, stop: threading.Event) -> Iterator[str]:
        """Stream the answer; it ends early when `stop` is set."""
        ...


class ChatModel(Protocol):
    """A model that goes on with messages."""

    def fits(self, messages: Sequence[Message]) -> bool:
        """Whether there is room for these and an answer, as far as can be told; raises if such
        messages cannot be told to the model at all."""
        ...

    def answer(self, messages: Sequence[Message], stop: threading.Event) -> Iterator[str]:
        """Stream the answer; it ends early when `stop` is set."""
        ...


class Conversation:
    """The messages so far, and the model that goes on with them."""

    def __init__(self, model: ChatModel, system_prompt: str | None = None):
        self._model = model
        self._head = [_message("system", system_prompt)] if system_prompt else []
        self.reset()
        # A missing or unfit template is said now, not at the first line that is typed.
        model.fits(self._messages([], "Hello"))

    def reset(self) -> None:
        self.turns: list[tuple[str, str]] = []  # what was said, what was answered

    def reply(self, said: str, stop: threading.Event) -> Iterator[str]:
        """Stream the answer; what came of it before `stop` joins the conversation."""
        kept = self.turns
        while kept and not self._model.fits(self._messages(kept, said)):
            kept = kept[1:]
        answer = self._model.answer(self._messages(kept, said), stop)
        if len(kept) < len(self.turns):
            forgotten = len(self.turns) - len(kept)
            note(f"The context is full: the oldest {forgotten} turns are forgotten.")
        pieces: list[str] = []
        for text in answer:
            pieces.append(text)
            yield text
        self.turns = [*kept, (said, "".join(pieces))]

    def _messages(self, turns: Sequence[tuple[str, str]], said: str) -> list[Message]:
        messages = list(self._head)
        for question, reply in turns:
            messages += [_message("user", question), _message("assistant", reply)]
        return [*messages, _message("user", said)]


def converse(replier: Replier) -> None:
    """Read lines and stream answers until the input ends. A person is told at once what had no
    answer; a pipe hears of it in the end, as an error."""
    is_person = sys.stdin.isatty()
    num_failed = 0
    if is_person:
        note(HELP)
        with contextlib.suppress(ImportError):  # not on every platform
            import readline  # noqa: F401  (gives input() line editing and history)
    while True:
        try:
            line = _read_line(">>> " if is_person else "")
            match line.strip():
                case "":
                    continue
                case "/exit":
                    break
                case "/reset":
                    replier.reset()
                    note("The conversation is forgotten.")
                case "/help":
                    note(HELP)
                case command if command.startswith("/"):
                    note(f"There is no command {command!r}; /help lists them.")
                case _:
                    try:
                        answer(replier, line)
                    except JaxLLMError as error:
                        note(f"jaxllm: error: {error}")
                        num_failed += 1
        except EOFError:
            break
        except KeyboardInterrupt:
            if not is_person:
                raise
            note("\nCtrl-D or /exit leaves.")
    if num_failed and not is_person:
        raise JaxLLMError(f"{counted(num_failed, 'line')} had no answer")


def answer(replier: Replier, line: str) -> None:
    """Stream the answer to a line."""
    with _interrupt_as_event() as stop:
        for text in replier.reply(line, stop):
            print(text, end="", flush=True)
        print(flush=True)


def note(text: str, end: str = "\n") -> None:
    """Say something that is not part of the answer."""
    print(text, end=end, file=sys.stderr, flush=True)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _read_line(prompt: str) -> str:
    try:
        return input(prompt)
    except UnicodeDecodeError as error:
        raise not_utf8("standard input", error) from None


@contextlib.contextmanager
def _interrupt_as_event() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event; an exception could hit the engine amid a step.

    A second one, for a step that does not end, leaves the program.
    """
    interrupted = threading.Event()

    def handle(signum: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            sys.exit(128 + signal.SIGINT)
        interrupted.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
