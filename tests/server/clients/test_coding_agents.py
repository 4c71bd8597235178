"""Coding agents, as their packages bring them: each makes a file with a tool, in its protocol.

    npm install --global @anthropic-ai/claude-code @openai/codex opencode-ai

A door between the agent and the server adds what the model is to say. The rest is the agent's.
"""

import http.server
import json
import os
import shutil
import subprocess
import threading

import httpx
import pytest

from jaxllm.testing import make_tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

MAX_MODEL_LEN = 65536  # what they say before the user says anything takes a quarter of it
COMMAND = "echo Hi > made"
# The tools that run a command, and what each is given.
CALLS = {
    "Bash": {"command": COMMAND, "description": "Make it"},
    "bash": {"command": COMMAND, "description": "Make it"},
    "exec_command": {"cmd": COMMAND},
}
TASK = "Make a file."
END = "The file is made."


@pytest.fixture(scope="module")
def server(new_host, scripted_options, tmp_path_factory):
    model = make_tiny_checkpoint(
        tmp_path_factory.mktemp("model"), max_position_embeddings=MAX_MODEL_LEN
    )
    options = {
        "model": str(model),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 64 << 20,
    }
    host = new_host(scripted_options | options)
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    try:
        with host.serve(access_log=False, **flags) as client:
            yield client
    finally:
        host.close()


@pytest.fixture
def door(server):
    """The address of the door, and the bodies that went through."""
    bodies = []

    class Door(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            asked = {"prompt": said(body), "add_special_tokens": False}
            script = server.post("/tokenize", json=asked).json()["tokens"]
            with httpx.stream(
                "POST",
                f"{server.base_url}{self.path}",
                json=body | {"vllm_xargs": {"script": script}},
                headers={"Anthropic-Version": self.headers.get("Anthropic-Version", "")},
                timeout=300,
            ) as answer:
                self.send_response(answer.status_code)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.end_headers()
                for piece in answer.iter_bytes():
                    self.wfile.write(piece)

        def do_HEAD(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Door) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listener.server_port}", bodies
        listener.shutdown()
        thread.join()


def said(body):
    """First a call of the agent's tool for commands, and then a word about its result."""
    last = json.dumps((body.get("messages") or body["input"])[-1])
    if any(kind in last for kind in ('"tool_result"', '"function_call_output"', '"role": "tool"')):
        return END
    for tool in body.get("tools") or ():
        name = tool.get("name") or tool.get("function", {}).get("name")
        if name in CALLS:
            call = json.dumps({"name": name, "arguments": CALLS[name]})
            return f"<tool_call>\n{call}\n</tool_call>"
    return "A file"  # a title, for instance


def run(agent, arguments, folder, **environment):
    """What an agent prints, in a home and a folder of its own."""
    program = shutil.which(agent)
    if program is None:
        pytest.skip(f"{agent} is not installed; see above")
    (folder / "home").mkdir()
    done = subprocess.run(
        [program, *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder / "home")} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_claude_code_through_messages(door, tmp_path):
    url, bodies = door
    answer = run(
        "claude",
        ["-p", TASK, "--output-format=json", "--allowedTools=Bash"],
        tmp_path,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="tiny",
        ANTHROPIC_SMALL_FAST_MODEL="tiny",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert json.loads(answer)["result"] == END
    assert (tmp_path / "made").read_text() == "Hi\n"
    assert len(bodies) >= 2


def test_codex_through_responses(door, tmp_path):
    url, bodies = door
    provider = f'{{name="here",base_url="{url}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}}'
    settings = ("model=tiny", "model_provider=here", f"model_providers.here={provider}",
                'web_search="disabled"')  # fmt: skip
    answer = run(
        "codex",
        ["exec", "--skip-git-repo-check", "--sandbox=danger-full-access",
         *(f"-c{one}" for one in settings), TASK],
        tmp_path,
        OPENAI_API_KEY="none",
    )  # fmt: skip
    assert answer.strip() == END
    assert (tmp_path / "made").read_text() == "Hi\n"
    assert any(tool["type"] == "namespace" for tool in bodies[0]["tools"])


def test_opencode_through_chats(door, tmp_path):
    url, _ = door
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"tiny": {"name": "tiny"}},
    }
    (tmp_path / "opencode.json").write_text(json.dumps({"provider": {"here": provider}}))
    answer = run("opencode", ["run", "-m", "here/tiny", TASK], tmp_path)
    assert END in answer
    assert (tmp_path / "made").read_text() == "Hi\n"
