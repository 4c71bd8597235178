"""A server with a key and parsers, and a model with scripted answers."""

import sys
from pathlib import Path

import pytest

KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="session")
def scripted_options(engine_options):
    """Options of an engine with a model that generates scripted answers."""
    # The engine's process imports the class from there.
    sys.path.append(str(Path(__file__).parent))
    return engine_options | {"logits_processors": ["scripted_model:Scripted"]}


@pytest.fixture(scope="session")
def host(new_host, scripted_options):
    """A separate engine."""
    host = new_host(scripted_options)
    yield host
    host.close()


@pytest.fixture(scope="session")
def server(host):
    """An HTTP client of the server that the tested clients use."""
    with host.serve(
        keys=(KEY,),
        access_log=False,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    ) as client:
        client.headers.update(HEADERS)
        yield client


@pytest.fixture(scope="session")
def url(server):
    return f"{server.base_url}/v1"


@pytest.fixture(scope="session")
def says(server):
    """The request fields that make the model generate a text."""

    def says(text):
        asked = {"prompt": text, "add_special_tokens": False}
        return {"vllm_xargs": {"script": server.post("/tokenize", json=asked).json()["tokens"]}}

    return says
