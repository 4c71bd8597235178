"""A script that takes answers of `LLM.chat` apart gets the messages that the server gives."""

import pytest

from jaxllm import LLM, AnswerFormat, SamplingParams

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sea"}}\n</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": "What is there?"}]


@pytest.fixture(scope="module")
def scripted(server, engine_options):
    llm = LLM(**engine_options, logits_processors=["scripted_model:Scripted"])
    yield llm
    llm.shutdown()


@pytest.mark.parametrize("text", [f"<think>Hm.</think>Wait. {CALL}", CALL + CALL, "Yes."])
def test_a_script_gets_the_messages_of_the_server(scripted, server, says, text):
    said = says(text)
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 120, "tools": [LOOK]} | said
    expected = server.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    answer_format = AnswerFormat.of("qwen3", "hermes")
    params = SamplingParams(
        temperature=0,
        max_tokens=120,
        skip_special_tokens=not answer_format.needs_special_tokens(),
        extra_args=said["vllm_xargs"],
    )

    [output] = scripted.chat(MESSAGES, params, use_tqdm=False, tools=[LOOK])
    answer = answer_format.parser(output.prompt, [LOOK]).parse(output.outputs[0].text)

    assert answer.reasoning == expected.get("reasoning", "")
    assert answer.content == (expected["content"] or "")
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    functions = [call["function"] for call in expected.get("tool_calls", ())]
    assert calls == [(function["name"], function["arguments"]) for function in functions]
    assert len(calls) == text.count(CALL)
