"""Makes conversations of the functions of Python sources, in the form of the chat template.

Questions alternate: one asks for a function by its signature and summary, the next asks what a
function does. So a model of code learns the turns of a chat, and when to stop.
"""

import ast
import inspect
import textwrap
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from jaxllm.training.tokenizer import END, START

_LONGEST_ANSWER = 1600  # characters
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Example(NamedTuple):
    question: str
    answer: str

    def render(self) -> str:
        """Format the example like the chat template."""
        turns = [("user", self.question), ("assistant", self.answer)]
        return "".join(f"{START}{role}\n{text}{END}\n" for role, text in turns)


def examples(source: str) -> Iterator[Example]:
    """Conversations about a Python source; none if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old sources have escapes that are invalid now
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    for number, node in enumerate(node for node in functions if _summary(node)):
        summary = _summary(node)
        if number % 2:
            yield Example(f"What does the Python function `{node.name}` do?", summary)
            continue
        code = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
        if 0 < len(code) <= _LONGEST_ANSWER:
            signature = f"{node.name}({ast.unparse(node.args)})"
            question = f"Write the Python function `{signature}`. {summary}"
            yield Example(question, f"```python\n{code}\n```")


def _summary(node: _Function) -> str:
    """The first paragraph of the docstring, on one line."""
    paragraphs = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").split("\n\n")
    return " ".join(paragraphs[0].split())[:400]
