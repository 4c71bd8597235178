"""An engine in a process of its own: `python -m jaxllm.engine.process`, started by a frontend.

Standard input brings the Assignment and then nothing more: its end means that the parent is gone,
however that came about, and this process with it. Ends of the process are the parent's to decide,
so signals that reach the whole group are ignored. Beside the loop a watch tells frontends that the
process lives, and ends it when the loop or a device of its hangs.
"""

import gc
import os
import queue
import shutil
import signal
import sys
import threading
from typing import BinaryIO, NoReturn

import msgspec
import zmq

from jaxllm.engine.busy_loop import EVERYBODY, BusyLoop, Inbox, Letter, Outbox, failure_of
from jaxllm.engine.io_threads import InputThread, OutputThread
from jaxllm.engine.launch import make_engine
from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.logging import init_logger
from jaxllm.messages import Assignment, Beat, Dead, Failure
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
    # From now on nothing more comes into the folder, which may be removed at any moment.
    threading.Thread(
        target=_end_with_parent, args=(assignment.directory,), name="parent", daemon=True
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
        engine = make_engine(assignment.config)
        # What is there now stays: no need to look through it for garbage again and again.
        gc.collect()
        gc.freeze()
        loop = BusyLoop(engine, inbox, outbox)
        watch.at_work = loop.at_work
        loop.run()
        engine.shutdown()
    except Exception as error:
        status = EXIT_DEAD
        if not isinstance(error, JaxLLMError):
            logger.exception("the engine has died")
        outbox.put(Letter(EVERYBODY, Dead(failure_of(error))))
    outbox.put(None)
    output.join()
    context.term()  # waits until the last words have gone out
    sys.stderr.flush()
    if status:
        # Devices may never come back, and JAX would wait for them.
        os._exit(status)


def read_assignment(stream: BinaryIO) -> Assignment:
    """The first line of a stream."""
    return msgspec.json.decode(stream.readline(), type=Assignment)


def end_with(*threads: threading.Thread) -> None:
    """End the process when one of these fails: it would live on, deaf or mute, and frontends would
    wait for it."""
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
    """End the process beside a loop that never will."""
    outbox.put(Letter(EVERYBODY, Dead(Failure(reason, EngineDeadError.__name__))))
    outbox.put(None)
    output.join(_LAST_WORDS_S)
    if not output.is_alive():
        context.term()  # waits until the last words have gone out
    os._exit(EXIT_DEAD)


def _end_with_parent(directory: str) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(directory, ignore_errors=True)  # nobody else will
    os._exit(EXIT_DEAD)


def _listen(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.ROUTER)
    # Frontends always read; a limit would lose what they are late for.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


if __name__ == "__main__":
    main()
