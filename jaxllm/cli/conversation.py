"""A conversation in the terminal: reads lines and prints answers of any model.

The same loop serves a user and a pipe; only a user sees a prompt sign. Only answers go to standard
output; everything else goes to standard error.
"""

import base64
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

from jaxllm.errors import JaxLLMError, ValidationError, not_utf8
from jaxllm.media.resizing import UndecodableError
from jaxllm.media.sources import read_file
from jaxllm.plural import counted

Message = dict[str, Any]  # role and content, as chat templates and servers expect
Content = str | list[dict[str, Any]]  # a line, or a line with the images before it

HELP = """\
/image FILE  give an image to the next line
/reset       forget the conversation
/help        show this
/exit        leave; so does Ctrl-D
Ctrl-C       stop the answer"""


class Replier(Protocol):
    """Answers lines."""

    def reset(self) -> None:
        """Forget all previous lines."""
        ...

    def show(self, path: str) -> None:
        """Give the image in a file to the next line; raise JaxLLMError."""
        ...

    def reply(self, said: str, stop: threading.Event) -> Iterator[str]:
        """Stream the answer; end early when `stop` is set."""
        ...


class ChatModel(Protocol):
    """A model that continues a conversation."""

    def fits(self, messages: Sequence[Message]) -> bool:
        """Whether the messages and an answer fit into the context, as far as is known. Raise if the
        model cannot take such messages at all."""
        ...

    def answer(self, messages: Sequence[Message], stop: threading.Event) -> Iterator[str]:
        """Stream the answer; end early when `stop` is set."""
        ...


class Conversation:
    """The messages so far, and the model that continues them."""

    def __init__(self, model: ChatModel, system_prompt: str | None = None):
        self._model = model
        self._head = [_message("system", system_prompt)] if system_prompt else []
        self.reset()
        # Report a missing or unsuitable template now, not after the first line.
        model.fits(self._messages([], "Hello"))

    def reset(self) -> None:
        self.turns: list[tuple[Content, str]] = []  # pairs of a line and its answer
        self._images: list[dict[str, Any]] = []  # of the next line

    def show(self, path: str) -> None:
        """Give the image in a file to the next line."""
        try:
            data = base64.b64encode(read_file(path)).decode()
        except UndecodableError as error:
            raise ValidationError(f"{path}: {error}") from None
        url = f"data:application/octet-stream;base64,{data}"
        self._images.append({"type": "image_url", "image_url": {"url": url}})

    def reply(self, said: str, stop: threading.Event) -> Iterator[str]:
        """Stream the answer. The part before `stop` joins the conversation."""
        images, self._images = self._images, []
        return self._reply([*images, {"type": "text", "text": said}] if images else said, stop)

    def _reply(self, said: Content, stop: threading.Event) -> Iterator[str]:
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

    def _messages(self, turns: Sequence[tuple[Content, str]], said: Content) -> list[Message]:
        messages = list(self._head)
        for question, reply in turns:
            messages += [_message("user", question), _message("assistant", reply)]
        return [*messages, _message("user", said)]


def converse(replier: Replier) -> None:
    """Read lines and stream answers until the input ends. A user sees each failure at once; for a
    pipe, failures raise an error at the end."""
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
                case command if command.startswith("/image "):
                    try:
                        replier.show(command.removeprefix("/image ").strip())
                    except JaxLLMError as error:
                        note(f"jaxllm: error: {error}")
                        num_failed += 1
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
    """Print a message that is not part of the answer."""
    print(text, end=end, file=sys.stderr, flush=True)


def _message(role: str, content: Content) -> Message:
    return {"role": role, "content": content}


def _read_line(prompt: str) -> str:
    try:
        return input(prompt)
    except UnicodeDecodeError as error:
        raise not_utf8("standard input", error) from None


@contextlib.contextmanager
def _interrupt_as_event() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event, because an exception could interrupt an engine step.

    A second Ctrl-C exits the program, in case a step does not end.
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
