"""The threads between an engine's queues and its sockets."""

import queue
import subprocess
import sys
import time

import msgspec
import zmq

from jaxllm.engine.busy_loop import EVERYBODY, Letter
from jaxllm.engine.io_threads import OutputThread
from jaxllm.engine.process import EXIT_DEAD
from jaxllm.messages import Beat, Dead, Failure, FromEngine


def test_last_words_reach_a_frontend_that_is_slower_to_start_than_the_engine_is_to_fail(tmp_path):
    context = zmq.Context()
    listening = context.socket(zmq.ROUTER)
    listening.bind(f"ipc://{tmp_path}/output")
    outbox = queue.SimpleQueue()
    thread = OutputThread(listening, outbox)
    thread.start()
    last_words = Dead(Failure("there is no such device", "ValidationError"))
    outbox.put(Letter(EVERYBODY, last_words))
    outbox.put(None)
    time.sleep(3)  # a frontend reads its tokenizer meanwhile
    frontend = context.socket(zmq.DEALER)
    frontend.setsockopt(zmq.IDENTITY, b"late")
    frontend.connect(f"ipc://{tmp_path}/output")
    frontend.send(b"")
    assert frontend.poll(30_000)
    assert msgspec.msgpack.decode(frontend.recv(), type=FromEngine) == last_words
    thread.join(30)
    assert not thread.is_alive()
    frontend.close(linger=0)
    context.term()


def test_a_beat_waits_for_nobody_and_reaches_who_is_there(tmp_path):
    context = zmq.Context()
    listening = context.socket(zmq.ROUTER)
    listening.bind(f"ipc://{tmp_path}/output")
    outbox = queue.SimpleQueue()
    thread = OutputThread(listening, outbox)
    outbox.put(Letter(EVERYBODY, Beat()))
    thread.start()
    frontend = context.socket(zmq.DEALER)
    frontend.setsockopt(zmq.IDENTITY, b"frontend")
    frontend.connect(f"ipc://{tmp_path}/output")
    frontend.send(b"")
    while not frontend.poll(10):
        outbox.put(Letter(EVERYBODY, Beat()))
    assert msgspec.msgpack.decode(frontend.recv(), type=FromEngine) == Beat()
    outbox.put(None)
    thread.join(30)
    assert not thread.is_alive()
    frontend.close(linger=0)
    context.term()


def test_a_process_does_not_outlive_its_threads():
    code = """
import threading, time
from jaxllm.engine.process import end_with
beside, vital = (threading.Thread(target=lambda: 1 / 0) for _ in range(2))
end_with(vital)
beside.start()
beside.join()
print("goes on", flush=True)
vital.start()
time.sleep(600)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == EXIT_DEAD and ended.stdout == "goes on\n"
    assert ended.stderr.count("ZeroDivisionError") == 2
