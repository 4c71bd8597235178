from jaxllm.parsers.deltas import (
    ArgumentsDelta,
    ContentDelta,
    DeltaWriter,
    ParsedAnswer,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
    add_up,
)


def test_deltas_add_up_to_the_answer():
    deltas = [
        ReasoningDelta("a"),
        ContentDelta("b"),
        ToolCallDelta(0, "id0", "f"),
        ArgumentsDelta(0, "{"),
        ContentDelta("c"),
        ArgumentsDelta(0, "}"),
        ToolCallDelta(1, "id1", "g"),
    ]

    assert add_up(deltas) == ParsedAnswer(
        "a", "bc", [ToolCall("id0", "f", "{}"), ToolCall("id1", "g", "")]
    )


def test_a_writer_joins_what_belongs_together_and_drops_what_is_empty():
    writer = DeltaWriter()
    writer.reasoning("a")
    writer.reasoning("b")
    writer.content("")
    writer.tool_call(ToolCallDelta(0, "id", "f"))
    writer.arguments(0, "{")
    writer.arguments(0, "}")
    writer.content("c")

    assert writer.take() == [
        ReasoningDelta("ab"),
        ToolCallDelta(0, "id", "f"),
        ArgumentsDelta(0, "{}"),
        ContentDelta("c"),
    ]
    assert writer.take() == []
