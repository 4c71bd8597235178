"""Renders chat templates in a process of its own, so that a slow template can be killed.

`python -m jaxllm.frontend.template_process SECONDS BYTES` reads conversations from standard input,
a line of JSON each, and answers each with a line. It is `confined`: a template may end it, and then
the parent starts another. If the process has grown by more than BYTES and cannot free them, it says
in its answer that this is the last, and ends.
"""

import gc
import subprocess
import sys
import threading

import msgspec

from jaxllm.confined import killed_after, limit_memory, open_answers, took_too_long
from jaxllm.errors import JaxLLMError, ValidationError, refused
from jaxllm.frontend.chat_template import Conversation, render
from jaxllm.heap import trim_heap
from jaxllm.metrics.memory import resident_bytes

# The most memory that a template may need, and the longest prompt that it may make.
_MEMORY_BYTES = 1 << 30
_MAX_CHARS = 64 << 20


class Rendered(msgspec.Struct):
    """The prompt of a conversation, or why there is none."""

    text: str | None = None
    error: str | None = None
    is_last: bool = False  # the process has grown too much, and ends


class TemplateProcess:
    """Runs one rendering process at a time, which `start` or the first `render` starts.
    Thread-safe: calls of `render` wait for each other."""

    def __init__(self, timeout_s: float, max_growth_bytes: int = 128 << 20):
        self._limits = timeout_s, max_growth_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start a process if none runs; do not wait until it is ready."""
        if self._is_closed or (self._process is not None and self._process.poll() is None):
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *map(str, self._limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def render(self, conversation: Conversation) -> str:
        """Return the prompt; raise ValidationError if the template fails or takes too long."""
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
        """Kill the process."""
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
        if took_too_long(status):
            raise refused(
                "chat_template_timeout",
                self._limits[0],
                "the chat template takes longer than so many seconds; send less, or start the "
                "server with a greater one",
            )
        raise ValidationError("chat_template: it has ended its process", parameter="chat_template")


def main() -> None:
    timeout_s, max_growth_bytes = float(sys.argv[1]), int(sys.argv[2])
    answers = open_answers()
    import transformers.utils.chat_template_utils  # noqa: F401  (before the clock runs)

    limit_memory(_MEMORY_BYTES)
    limit_bytes = resident_bytes() + max_growth_bytes
    for line in sys.stdin.buffer:
        conversation = msgspec.json.decode(line, type=Conversation)
        with killed_after(timeout_s):
            answer = _answer(conversation)
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
    """Free what a template has left behind; return whether `limit_bytes` suffice then."""
    if resident_bytes() <= limit_bytes:
        return True
    gc.collect()  # an error keeps alive all objects that its template made
    trim_heap()
    return resident_bytes() <= limit_bytes


if __name__ == "__main__":
    main()
