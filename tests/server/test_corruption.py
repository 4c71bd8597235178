"""A model whose logits are no numbers: its answers are errors, and the server lives on."""

import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.testing import make_tiny_checkpoint

GLITCH, HEALTHY = 300, 5
WHY = "the logits are not finite numbers"


@pytest.fixture
def client(engine_options, make_host, tmp_path):
    weights = load_file(make_tiny_checkpoint(tmp_path) / "model.safetensors")
    weights["model.embed_tokens.weight"][GLITCH] = np.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with make_host(engine_options | {"model": str(tmp_path)}).serve() as client:
        yield client


def complete(client, token, **options):
    body = {"model": "tiny", "prompt": [token], "max_tokens": 3, "ignore_eos": True, **options}
    return client.post("/v1/completions", json=body)


def test_an_answer_without_numbers_is_an_error_however_it_is_asked_for(client):
    for stream in (False, True):
        answer = complete(client, GLITCH, stream=stream)
        assert answer.status_code == 500
        assert WHY in answer.json()["error"]["message"]
    healthy = complete(client, HEALTHY)
    assert healthy.status_code == 200 and healthy.json()["usage"]["completion_tokens"] == 3
    figures = client.get("/metrics").text
    assert re.search(r"^jaxllm:corrupted_requests_total\{.*\} 2\.0$", figures, re.M), figures
