"""An engine in a process of its own: `python -m jaxllm.engine.process`, started by a frontend.

Standard input brings the Assignment and nothing else. Its end means that the parent is gone, for
whatever reason, and then this process ends too, in order if it can. The parent decides when to
stop, so the process ignores signals to the whole group. A watch beside the loop tells frontends
that the process lives, and ends it when the loop or a device hangs.
"""

import functools
import gc
import os
import queue
import shutil
import signal
import sys
import threading
import time
from typing import BinaryIO, NoReturn

import msgspec
import zmq

from jaxllm.ending import longest_end_s
from jaxllm.engine.busy_loop import EVERYBODY, BusyLoop, Inbox, Letter, Outbox, failure_of
from jaxllm.engine.io_threads import InputThread, OutputThread
from jaxllm.engine.launch import make_engine
from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.logging import init_logger
from jaxllm.messages import Assignment, Beat, Dead, Failure, Follows, Hello, Stop
from jaxllm.watch import Watch

logger = init_logger(__name__)

EXIT_DEAD = 1
_LAST_WORDS_S = 10.0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    assignment = read_assignment(sys.stdin.buffer)
    sys.path[:] = assignment.python_path
    context = zmq.Context()
    inbox: Inbox = queue.SimpleQueue()
    outbox: Outbox = queue.SimpleQueue()
    requests = InputThread(_listen(context, assignment.input_address), inbox)
    output = OutputThread(_listen(context, assignment.output_address), outbox)
    runs = threading.Event()
    # From now on no file is added to the folder, so the thread may remove it at any moment.
    threading.Thread(
        target=_end_with_parent, args=(assignment, inbox, runs), name="parent", daemon=True
    ).start()
    watch = Watch(
        assignment.config,
        on_hang=lambda reason: _end_hung(reason, outbox, output, context),
        on_look=lambda: outbox.put(Letter(EVERYBODY, Beat())),
    )
    end_with(requests, output, watch)
    requests.start()
    output.start()
    watch.start()
    status = 0
    try:
        answer = functools.partial(_answer_as_follower, inbox, outbox)
        engine = make_engine(
            assignment.config,
            on_follow=threading.Thread(target=answer, name="follower", daemon=True).start,
        )
        # The objects that exist now stay, so the garbage collector need not scan them again.
        gc.collect()
        gc.freeze()
        loop = BusyLoop(engine, inbox, outbox)
        watch.at_work = loop.at_work
        runs.set()
        loop.run()
        watch.stop()  # whoever waits for this process has a limit of its own
        engine.shutdown()
    except Exception as error:
        status = EXIT_DEAD
        if not isinstance(error, JaxLLMError):
            logger.exception("the engine has died")
        outbox.put(Letter(EVERYBODY, Dead(failure_of(error))))
    outbox.put(None)
    output.join()
    context.term()  # waits until the last messages are sent
    sys.stderr.flush()
    if status:
        # JAX would wait for devices, which may never answer.
        os._exit(status)


def read_assignment(stream: BinaryIO) -> Assignment:
    """Read the Assignment from the first line of a stream."""
    return msgspec.json.decode(stream.readline(), type=Assignment)


def end_with(*threads: threading.Thread) -> None:
    """End the process when one of these threads fails. Otherwise it would live on without reading
    or sending, and frontends would wait for it."""
    otherwise = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        otherwise(args)
        if args.thread in threads:
            sys.stderr.flush()
            os._exit(EXIT_DEAD)

    threading.excepthook = hook


def _end_hung(
    reason: str, outbox: Outbox, output: OutputThread, context: "zmq.Context[zmq.Socket[bytes]]"
) -> NoReturn:
    """End the process while its loop hangs."""
    outbox.put(Letter(EVERYBODY, Dead(Failure(reason, EngineDeadError.__name__))))
    outbox.put(None)
    output.join(_LAST_WORDS_S)
    if not output.is_alive():
        context.term()  # waits until the last messages are sent
    os._exit(EXIT_DEAD)


def _end_with_parent(assignment: Assignment, inbox: Inbox, runs: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(assignment.directory, ignore_errors=True)  # the parent can no longer remove it
    if runs.is_set():
        # The loop ends the engine in order, unless it or a device hangs.
        inbox.put(Letter(EVERYBODY, Stop()))
        time.sleep(longest_end_s(assignment.config))
    os._exit(EXIT_DEAD)


def _answer_as_follower(inbox: Inbox, outbox: Outbox) -> None:
    """Answer frontends in place of a loop, which this process never has."""
    while True:
        letter = inbox.get()
        if isinstance(letter.message, Hello):
            outbox.put(Letter(letter.client, Follows()))


def _listen(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.ROUTER)
    # Frontends always read. A limit would drop messages of a frontend that is late.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


if __name__ == "__main__":
    main()
