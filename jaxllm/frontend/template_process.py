"""Renders chat templates in a process of its own, which a template that takes too long ends.

`python -m jaxllm.frontend.template_process SECONDS BYTES` reads conversations from standard input,
a line of JSON each, and answers each with a line. Before it renders, it sets a timer whose signal
ends the process, in the midst of whatever it does; nothing in a template can keep it from that. The
parent sees the end of the pipe, and starts another one. The same when it has grown by so many bytes
and cannot give them back, but for the answer, which says that it is the last.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from jaxllm.errors import JaxLLMError, ValidationError, refused
from jaxllm.frontend.chat_template import Conversation, render
from jaxllm.heap import trim_heap
from jaxllm.metrics.memory import resident_bytes

# A template may need this much memory, and write so long a prompt.
_MEMORY_BYTES = 1 << 30
_MAX_CHARS = 64 << 20


class Rendered(msgspec.Struct):
    """What became of a conversation: a prompt, or why not."""

    text: str | None = None
    error: str | None = None
    is_last: bool = False  # its process has grown, and ends


class TemplateProcess:
    """One such process at a time, started when it is needed or by `start`. Thread-safe: who calls
    `render` waits for those who called before."""

    def __init__(self, timeout_s: float, max_growth_bytes: int = 128 << 20):
        self._limits = timeout_s, max_growth_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Have a process ready, or about to be: does not wait for it."""
        if self._is_closed or (self._process is not None and self._process.poll() is None):
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *map(str, self._limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def render(self, conversation: Conversation) -> str:
        """The prompt; raises ValidationError if there is none, or not in time."""
        try:
            line = msgspec.json.encode(conversation)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValidationError(f"messages: they are not JSON: {error}") from None
        with self._lock:
            answer = self._ask(line + b"\n")
        if answer.text is None:
            raise ValidationError(answer.error or "", parameter="messages")
        return answer.text

    def close(self) -> None:
        """End the process, whatever it does."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _ask(self, line: bytes) -> Rendered:
        self.start()
        process = self._process
        if process is None or self._is_closed:
            raise JaxLLMError("the server is stopping")
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        rendered = msgspec.json.decode(answer, type=Rendered) if answer else None
        if rendered is not None and not rendered.is_last:
            return rendered
        status = process.wait()
        self.start()
        if rendered is not None:
            return rendered
        if status == -signal.SIGALRM:
            raise refused(
                "chat_template_timeout",
                self._limits[0],
                "the chat template takes longer than so many seconds; send less, or start the "
                "server with a greater one",
            )
        raise ValidationError("chat_template: it has ended its process", parameter="chat_template")


def main() -> None:
    # When to end is for the parent to say, by the end of standard input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    timeout_s, max_growth_bytes = float(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anybody prints is no answer
    import transformers.utils.chat_template_utils  # noqa: F401  (before the clock runs)

    _limit_memory()
    limit_bytes = resident_bytes() + max_growth_bytes
    for line in sys.stdin.buffer:
        conversation = msgspec.json.decode(line, type=Conversation)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        answer = _answer(conversation)
        signal.setitimer(signal.ITIMER_REAL, 0)
        conversation = None
        answer.is_last = not _has_shrunk(limit_bytes)
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()
        if answer.is_last:
            return


def _answer(conversation: Conversation) -> Rendered:
    try:
        text = render(conversation)
    except ValidationError as error:
        return Rendered(error=str(error)[:2000])
    if len(text) > _MAX_CHARS:
        return Rendered(error=f"chat_template: the prompt is longer than {_MAX_CHARS} characters")
    return Rendered(text=text)


def _has_shrunk(limit_bytes: int) -> bool:
    """Let go of what a template has left behind; whether no more than this is in use then."""
    if resident_bytes() <= limit_bytes:
        return True
    gc.collect()  # an error keeps all that its template had made
    trim_heap()
    return resident_bytes() <= limit_bytes


def _limit_memory() -> None:
    """Allow so much more than there is in use, where the system tells."""
    import resource

    statm = Path("/proc/self/statm")
    if statm.exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize()
        limit = size + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
