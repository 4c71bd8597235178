"""`jaxllm models` lists what can be run, and README.md has the same table."""

from pathlib import Path

import pytest

from jaxllm.cli.main import main
from jaxllm.cli.models import summary
from jaxllm.models.registry import family_names

README = Path(__file__).parents[2] / "README.md"


def test_readme_has_the_table(capsys):
    assert main(["models"]) == 0
    table = capsys.readouterr().out
    _, begin, rest = README.read_text(encoding="utf-8").partition("<!-- jaxllm models -->\n")
    block, end, _ = rest.partition("<!-- end of jaxllm models -->")
    assert begin and end
    assert block.strip() == table.strip(), "put the output of `jaxllm models` into README.md"


@pytest.mark.parametrize("family", family_names())
def test_the_page_of_a_family_begins_with_what_its_models_are(family):
    assert summary(family).endswith(".")
