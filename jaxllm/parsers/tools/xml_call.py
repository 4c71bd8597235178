"""The formats of Qwen 3 Coder, Seed OSS, MiniMax M2, DeepSeek V3.2 and Step 3: each parameter's
value is plain text between tags.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

    <seed:tool_call>
    <function=get_weather>
    <parameter=city>Paris</parameter>
    </function>
    </seed:tool_call>

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    </invoke>
    </minimax:tool_call>

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

    <｜tool_calls_begin｜>
    <｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">
    <steptml:parameter name="city">Paris</steptml:parameter>
    </steptml:invoke><｜tool_call_end｜>
    <｜tool_calls_end｜>

The outer tags of the last three are around all calls. DeepSeek says which values are strings.

The parser writes the arguments as JSON, by the types in the tool's schema. Parameters that are not
in the schema are strings. Qwen writes a value on lines of its own: one line break at each end
belongs to the tags. The others do not, and all line breaks belong to the value.

Models omit tags. A call may begin at its function's tag, and end where the next call begins. A
value ends at its closing tag if another tag or the end of the answer follows; otherwise the closing
tag is part of the value. A value also ends at a line that begins with the next parameter or the end
of the call. Other text between parameters becomes content.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxllm.parsers.text_stream import SPACE, Markers, Reading, TextStream
from jaxllm.parsers.tools.base import (
    Tool,
    ToolCallOutput,
    ToolFormat,
    read_content,
    read_end,
)
from jaxllm.parsers.tools.parameter_types import parameter_types, quote
from jaxllm.parsers.tools.parameter_value import ParameterValue, ValueTags, read_tagged_value


class _Tags(NamedTuple):
    """The tags of a format. Those of functions and parameters begin so, and a name follows."""

    open: str
    close: str
    function: str = "<function="
    end_function: str = "</function>"
    # What stands around a function's tags; "" if nothing does.
    before_function: str = ""
    after_function: str = ""
    parameter: str = "<parameter="
    end_parameter: str = "</parameter>"
    name: re.Pattern[str] = re.compile(r"[^\s<>]*")
    # What ends the tag of a function.
    end_of_name: str = ">"
    # What ends that of a parameter, and the types of values that it announces; None: the schema's.
    end_of_head: Mapping[str, frozenset[str] | None] = {">": None}
    # How many line breaks at each end of a value belong to its tags.
    num_line_breaks: int = 0


class _XmlCalls:
    """The format with these tags."""

    def __init__(self, tags: _Tags):
        self._tags = tags
        begin = tuple(filter(None, (tags.open, tags.before_function, tags.function)))
        self._begin = Markers(*begin)
        # What ends a call whose function is not closed.
        self._ends = tuple(filter(None, (tags.after_function, tags.close, *begin)))
        after_value = (tags.parameter, tags.end_function, *self._ends)
        self._after_value = Markers(*after_value)
        self._value_tags = ValueTags(
            tags.end_parameter, after_value, (tags.parameter, tags.end_function, tags.close)
        )

    def read(self, text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
        tags = self._tags
        while (yield from read_content(text, out, self._begin)):
            if (yield from text.accept(tags.open, out.form)):
                yield from text.take_while(SPACE, out.form)
            if tags.before_function and (yield from text.accept(tags.before_function, out.form)):
                yield from text.take_while(SPACE, out.form)
            if not (yield from text.accept(tags.function, out.form)):
                continue
            name = yield from text.collect(tags.name, out.form)
            if name and (yield from text.accept(tags.end_of_name, out.form)):
                out.begin_call(name)
                yield from self._read_parameters(text, out, parameter_types(tools, name))
                out.end_call()
                if tags.after_function:
                    yield from read_end(text, out, tags.after_function)
                yield from read_end(text, out, tags.close)

    def _read_parameters(
        self, text: TextStream, out: ToolCallOutput, types: dict[str, frozenset[str]]
    ) -> Reading[None]:
        tags = self._tags
        out.arguments("{")
        separator = ""
        while True:
            yield from text.take_while(SPACE, out.form)
            if (yield from text.accept(tags.parameter, out.form, may_be_cut_off=True)):
                name = yield from text.collect(tags.name, out.form)
                head = (yield from self._read_end_of_head(text, out)) if name else None
                if head is not None:
                    out.arguments(f"{separator}{quote(name)}: ")
                    separator = ", "
                    value = ParameterValue(
                        tags.end_of_head[head] or types.get(name),
                        out.arguments,
                        num_line_breaks=tags.num_line_breaks,
                    )
                    yield from read_tagged_value(text, value, self._value_tags)
                elif (yield from text.peek()):
                    out.content(tags.parameter + name)
                else:
                    return  # cut off: the brace stays open
                continue
            if (yield from text.accept(tags.end_function, out.form, may_be_cut_off=True)):
                break
            marker = yield from text.take_until(self._after_value, out.content)
            if marker is None:
                return
            if marker in self._ends:
                break
        out.arguments("}")

    def _read_end_of_head(self, text: TextStream, out: ToolCallOutput) -> Reading[str | None]:
        """Read what ends the tag of a parameter; None if nothing does."""
        for end in self._tags.end_of_head:
            if (yield from text.accept(end, out.form, may_be_cut_off=True)):
                return end
        return None


def _format(tags: _Tags) -> ToolFormat:
    return ToolFormat(_XmlCalls(tags).read, needs_special_tokens=True)


QWEN3_XML = _format(_Tags("<tool_call>", "</tool_call>", num_line_breaks=1))
SEED_OSS = _format(_Tags("<seed:tool_call>", "</seed:tool_call>"))

_QUOTED = re.compile(r'[^<>"]*')
MINIMAX_M2 = _format(
    _Tags(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        function='<invoke name="',
        end_function="</invoke>",
        parameter='<parameter name="',
        name=_QUOTED,
        end_of_name='">',
        end_of_head={'">': None},
    )
)
STEP3 = _format(
    _Tags(
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        function='<steptml:invoke name="',
        end_function="</steptml:invoke>",
        before_function="<｜tool_call_begin｜>function<｜tool_sep｜>",
        after_function="<｜tool_call_end｜>",
        parameter='<steptml:parameter name="',
        end_parameter="</steptml:parameter>",
        name=_QUOTED,
        end_of_name='">',
        end_of_head={'">': None},
    )
)
_DSML = "｜DSML｜"
DEEPSEEK_V32 = _format(
    _Tags(
        f"<{_DSML}function_calls>",
        f"</{_DSML}function_calls>",
        function=f'<{_DSML}invoke name="',
        end_function=f"</{_DSML}invoke>",
        parameter=f'<{_DSML}parameter name="',
        end_parameter=f"</{_DSML}parameter>",
        name=_QUOTED,
        end_of_name='">',
        end_of_head={
            '" string="true">': frozenset({"string"}),
            '" string="false">': frozenset(
                {"number", "integer", "boolean", "object", "array", "null"}
            ),
            '">': None,
        },
    )
)
