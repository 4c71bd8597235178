"""A file of requests gets the messages that the server gives."""

import json

from jaxllm.cli.main import main

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sea"}}\n</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
PATH = "/v1/chat/completions"


def test_a_batch_gives_the_answers_of_the_server(server, says, engine_options, tmp_path):
    common = {"messages": [{"role": "user", "content": "What is there?"}], "temperature": 0}
    common["max_tokens"] = 120
    bodies = [
        common | says(f"<think>Hm.</think>Wait. {CALL}") | {"tools": [LOOK]},
        common | says(CALL + CALL) | {"tools": [LOOK], "parallel_tool_calls": False},
        common | says(CALL) | {"tools": [LOOK], "tool_choice": "none"},
        common | says("<think>Hm.</think>Yes.") | {"include_reasoning": False},
        common | {"tools": [LOOK], "tool_choice": "required"},
        common | {"structured_outputs": {"choice": ["yes", "no"]}},
        common | {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
    ]
    lines = [
        {"custom_id": str(place), "method": "POST", "url": PATH, "body": body}
        for place, body in enumerate(bodies)
    ]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["run-batch", "--ordered", f"-i={tmp_path / 'in'}", f"-o={tmp_path / 'out'}"]
    command += ["--error-file", str(tmp_path / "errors"), "--served-model-name", "tiny", "alias"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    command += ["--reasoning-parser=qwen3", "--logits-processors=scripted_model:Scripted"]
    options = dict(engine_options)
    command += ["--enforce-eager"] * options.pop("enforce_eager")
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]

    assert main(command) == 0

    files = (tmp_path / "out").read_text() + (tmp_path / "errors").read_text()
    answers = [json.loads(line)["response"]["body"] for line in files.splitlines()]
    expected = [server.post(PATH, json=body).json() for body in bodies]
    assert list(map(comparable, answers)) == list(map(comparable, expected))
    messages = [answer["choices"][0]["message"] for answer in answers[:-3]]
    assert messages[0]["reasoning"] == "Hm."
    assert [len(one.get("tool_calls", ())) for one in messages] == [1, 1, 0, 0]


def comparable(answer):
    """Without what is chance: ids, the time, and what was in the cache."""
    for choice in answer.get("choices", ()):
        for call in choice["message"].get("tool_calls", ()):
            assert call.pop("id")
    for name in ("id", "created"):
        answer.pop(name, None)
    answer.get("usage", {}).pop("prompt_tokens_details", None)
    return answer
