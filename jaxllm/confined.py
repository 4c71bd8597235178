"""For a process that works on what may be hostile, so that its parent can do without it.

The parent sends it work through standard input and sees the end of its answers if it ends. The
system bounds its memory, and a timer whose signal kills it bounds the time of a piece of work:
nothing in the work can prevent either.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def open_answers() -> BinaryIO:
    """Make this process one of these, and return where its answers go."""
    # The parent ends the process by closing standard input, so ignore signals to the group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what other code prints must not become an answer
    return answers


def limit_memory(num_bytes: int) -> None:
    """Limit the memory to so much more than is in use, where the system reports that."""
    import resource

    statm = Path("/proc/self/statm")
    if statm.exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + num_bytes, size + num_bytes))


@contextlib.contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """Kill this process if what is inside takes longer (`took_too_long`)."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def took_too_long(status: int) -> bool:
    """Whether a process that ended with this status was killed by its timer."""
    return status == -signal.SIGALRM
