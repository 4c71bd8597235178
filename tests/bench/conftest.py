"""A real server with a tiny model, and a scripted one."""

import asyncio
import re
import subprocess
import sys
import threading

import pytest

from jaxllm.testing import make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def engine_flags():
    return [
        "--max-model-len=256", "--max-num-seqs=4", "--max-num-batched-tokens=64",
        "--kv-cache-memory-bytes=4MiB", "--enforce-eager",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def server_port(tiny_model, engine_flags):
    """The port of a real server."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxllm.cli.main", "serve", tiny_model, "--port=0", *engine_flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    log = []
    for line in process.stderr:
        log.append(line)
        if found := re.search(r"serving .* at http://127.0.0.1:(\d+)", line):
            break
    else:
        pytest.fail("".join(log))
    reader = threading.Thread(target=process.stderr.read)  # otherwise the pipe would fill up
    reader.start()
    yield int(found[1])
    process.terminate()
    process.wait(300)
    reader.join()


@pytest.fixture
def scripted_server():
    """Start a server that answers each request with the bytes that a function returns for the
    number of the request, and then closes the connection; None closes it at once."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = []

    def start(respond):
        numbers = iter(range(1_000_000))

        async def handle(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            for part in respond(next(numbers)):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.close()

        serving = asyncio.start_server(handle, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(serving, loop).result(200)
        servers.append(server)
        return server.sockets[0].getsockname()[1]

    yield start
    for server in servers:
        loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
