"""`jaxllm models` lists what can be run, and jaxllm/models/README.md has the same table."""

import json
from pathlib import Path

import pytest

from jaxllm.cli.main import main
from jaxllm.cli.models import is_larger, summary
from jaxllm.models.registry import architectures_of, family_names
from jaxllm.testing import tiny_config
from tests.models.test_inside_larger_model import WRAPPED

README = Path(__file__).parents[2] / "jaxllm" / "models" / "README.md"
GOLDEN = Path(__file__).parents[1] / "models" / "golden.json"


def test_readme_has_the_table(capsys):
    assert main(["models"]) == 0
    table = capsys.readouterr().out
    _, begin, rest = README.read_text(encoding="utf-8").partition("<!-- jaxllm models -->\n")
    block, end, _ = rest.partition("<!-- end of jaxllm models -->")
    assert begin and end
    assert block.strip() == table.strip(), "put the output of `jaxllm models` into this page"


@pytest.mark.parametrize("family", family_names())
def test_the_page_of_a_family_begins_with_what_its_models_are(family):
    assert summary(family).endswith(".")


def test_every_architecture_is_compared_as_the_table_says():
    cases = json.loads(GOLDEN.read_text()).values()
    with_transformers = {
        name
        for case in cases
        for name in (tiny_config(case["family"]) | case["config"])["architectures"]
    }
    names = {name for family in family_names() for name in architectures_of(family)}
    assert {name for name in names if not is_larger(name)} == with_transformers
    assert {name for name in names if is_larger(name)} == set(WRAPPED.values())
