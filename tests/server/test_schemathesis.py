"""Requests made of the server's own description, valid and not: every answer is one that it
describes, and what it forbids is refused."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # the first one starts an engine

# What is valid by itself may contradict another field; test_refusals has what need not be so.
OPTIONS = (
    "--exclude-checks positive_data_acceptance --generation-deterministic --request-timeout 120 "
    "--continue-on-failure --no-color"
)
# Answers are short, and few at once.
SERVER = {"max_new_tokens": 4, "max_queued_requests": 12, "access_log": False}
WITH_A_KEY = {
    "keys": ("a-key",),
    "enable_tokenizer_info_endpoint": True,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "trust_request_chat_template": True,
    "allowed_origins": ("https://a.example",),
}


@pytest.mark.parametrize(
    ("options", "phases"),
    [
        pytest.param({}, "--phases fuzzing -n 20", marks=pytest.mark.sweep),
        (WITH_A_KEY, "--phases coverage,fuzzing -n 5"),
        pytest.param(WITH_A_KEY, "--phases fuzzing -n 20", marks=pytest.mark.sweep),
    ],
    ids=["open", "with a key", "more with a key"],
)
def test_every_answer_is_as_described(host, options, phases, tmp_path):
    with host.serve(**SERVER, **options, batch_dir=str(tmp_path / "batches")) as client:
        headers = [f"Authorization: Bearer {key}" for key in options.get("keys", ())]
        # The first answers of a server may have to compile.
        first = client.post(
            "/v1/completions",
            json={"prompt": "a", "logprobs": 1, "prompt_logprobs": 1, "top_k": 3, "top_p": 0.5},
            headers=dict(one.split(": ") for one in headers),
        )
        assert first.status_code == 200
        command = [sys.executable, "-m", "schemathesis.cli", "run"]
        command += [f"{client.base_url}/openapi.json", *OPTIONS.split(), *phases.split()]
        for header in headers:
            command += ["-H", header]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0 and " passed" in done.stdout, (
            done.stdout[-8000:] + done.stderr[-2000:]
        )
        assert client.get("/health").status_code == 200
    assert host.wait_until_idle().num_blocks_used == 0
