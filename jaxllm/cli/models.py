"""`jaxllm models`: prints a table of the models that can be run, as README.md has it.

The page of a family says in its docstring what the models are. The page is read and not imported,
because families import jax.
"""

import argparse
import ast
from importlib import resources

from jaxllm.models import families
from jaxllm.models.registry import architectures_of, around_names, encoder_names, family_names

_SEEING = ("mistral3", "qwen2", "qwen3", "qwen3_5", "qwen3_moe")  # whose towers are computed, too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: this command has no arguments of its own."""


def run(args: argparse.Namespace) -> None:
    print("\n".join(table()))


def table() -> list[str]:
    """The lines of a table in Markdown, with a row for each family."""
    titles = ("Family", "Models", "`architectures` in config.json", "Compared with")
    rows = [titles, ("---",) * len(titles)]
    for family in sorted((*family_names(), *encoder_names(), *around_names())):
        names = ", ".join(f"`{name}`" for name in architectures_of(family))
        rows.append((family, summary(family), names, comparison(family)))
    return [f"| {' | '.join(row)} |" for row in rows]


def comparison(family: str) -> str:
    """What the tests compare a family's tiny checkpoints with."""
    if family in encoder_names():
        return "transformers; pools only"
    if family in around_names():
        return "transformers, by images"
    larger = [name for name in architectures_of(family) if is_larger(name)]
    if not larger:
        return "transformers"
    inside = " and ".join(f"`{name}`" for name in larger)
    compared = f"transformers; the decoder in {inside} with the decoder alone"
    return f"{compared}, and with the tower by images" if family in _SEEING else compared


def is_larger(name: str) -> bool:
    """Whether an architecture has towers around its decoder."""
    return name.endswith("ForConditionalGeneration")


def summary(family: str) -> str:
    """The first sentence of the family's page."""
    page = resources.files(families).joinpath(f"{family}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(page)) or ""
    return " ".join(docstring.partition("\n\n")[0].split())
