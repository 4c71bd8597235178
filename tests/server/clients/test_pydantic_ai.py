"""pydantic-ai as it comes: an agent that calls a function, and an answer of a type, by chats, by
responses and by Anthropic's messages."""

import asyncio
from typing import Literal

import pydantic
import pytest

pytestmark = pytest.mark.slow  # the first one starts an engine

KEY = "a-key"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sea"}}\n</tool_call>'
SEEN = "I see waves."


class Pair(pydantic.BaseModel):
    colour: Literal["red", "blue"]
    is_large: bool


@pytest.fixture(scope="module")
def agents():
    return pytest.importorskip("pydantic_ai")


@pytest.fixture(scope="module", params=["chats", "responses", "messages"])
def model(request, agents, server, url):
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if request.param == "messages":
        provider = AnthropicProvider(base_url=str(server.base_url), api_key=KEY)
        return AnthropicModel("tiny", provider=provider)
    kind = OpenAIChatModel if request.param == "chats" else OpenAIResponsesModel
    return kind("tiny", provider=OpenAIProvider(base_url=url, api_key=KEY))


@pytest.fixture
def agent(agents, model, says):
    """An agent whose model first calls a function, and then says what it has seen."""

    def settings(context):
        script = says(SEEN if context.run_step > 1 else CALL)
        return {"max_tokens": 150, "extra_body": script}

    agent = agents.Agent(model, model_settings=settings)
    agent.places = []

    @agent.tool_plain
    def look(at: str) -> str:
        agent.places.append(at)
        return "Waves."

    return agent


def test_an_agent_calls_a_function_and_hears_of_its_result(agent):
    result = agent.run_sync("What is there?")
    assert (result.output, agent.places) == (SEEN, ["the sea"])
    assert result.usage.requests == 2 and result.usage.tool_calls == 1
    assert result.usage.input_tokens > 0 and result.usage.output_tokens > 0


def test_a_stream_of_an_agent_is_the_whole_in_pieces(agent):
    async def use():
        async with agent.run_stream("What is there?") as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert asyncio.run(use()) == SEEN
    assert agent.places == ["the sea"]


def test_an_answer_has_its_type(agents, model, says):
    """By the form of the text, where the client knows that a server keeps one."""
    text = Pair(colour="blue", is_large=True).model_dump_json()
    asked = {"max_tokens": 150, "extra_body": says(f"<think>Hm.</think>{text}")}
    profile = {"supports_json_schema_output": True}
    agent = agents.Agent(model, output_type=agents.NativeOutput(Pair))
    with agent.override(model=type(model)("tiny", provider=model.provider, profile=profile)):
        result = agent.run_sync("A pair?", model_settings=asked)
    assert result.output == Pair(colour="blue", is_large=True)
