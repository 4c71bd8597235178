"""What is imported with what. All in one process, where a row of the table below has also what the
rows before it have loaded: so the lightest come first, and none loads what one after it shuns."""

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

from jaxllm.cli.main import COMMANDS
from tests.test_architecture import HOST_SIDE, is_part_of, sources

HEAVY = {"jax", "jaxlib", "flax", "torch", "transformers"}
HELP = """
from jaxllm.cli.main import main
try:
    main([*{words!r}, "--help"])
except SystemExit as end:
    assert end.code == 0
"""
REGISTER = """
from jaxllm import ModelRegistry
ModelRegistry.register_model("Own", "not_there:Own")
"""
CHECKPOINT = """
import tempfile
from jaxllm.testing import make_tiny_checkpoint
with tempfile.TemporaryDirectory() as path:
    make_tiny_checkpoint(path)
"""
TOKENIZER = """
from jaxllm.config import ModelConfig
from jaxllm.frontend.tokenizer import load_tokenizer
load_tokenizer(ModelConfig(model="m", tokenizer="bundled"), "elsewhere")
"""


class Row(NamedTuple):
    name: str
    code: str
    shuns: set[str]


# These are Ray's part of a fleet, and are imported by its processes alone.
OF_RAY = {"jaxllm.server.ray.fleet", "jaxllm.server.ray.request_router"}


def unit(name: str) -> Row:
    found = [s.module for s in sources() if is_part_of(s.module, f"jaxllm.{name}")]
    modules = [module for module in found if module not in OF_RAY]
    assert modules, f"jaxllm.{name} does not exist"
    return Row(name, f"import {', '.join(modules)}", {"jax", "jaxlib", "flax", "torch"})


ROWS = [
    Row("jaxllm", "import jaxllm", HEAVY | {"numpy"}),
    Row("jaxllm.cli.main", "import jaxllm.cli.main", HEAVY | {"numpy"}),
    *(Row(f"{name} --help", HELP.format(words=name.split()), HEAVY) for name in COMMANDS),
    Row("a logits processor", "from jaxllm import LogitsProcessor", HEAVY),
    Row("registering a model", REGISTER, HEAVY | {"not_there"}),
    Row("the output processor", "import jaxllm.frontend.output_processor", HEAVY),
    Row("requests with forms", "import jaxllm.frontend.answer_form", HEAVY | {"llguidance"}),
    *map(unit, HOST_SIDE),
    Row("making a checkpoint", CHECKPOINT, {"torch", "transformers"}),
    # One that is all in its file.
    Row("loading a tokenizer", TOKENIZER, {"torch"}),
]
SCRIPT = """
import contextlib, io, json, sys
for code in json.loads(sys.stdin.read()):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {"__name__": "row"})
    print(json.dumps([list(sys.modules), said.getvalue()]), flush=True)
"""


class After(NamedTuple):
    """What there is after a row."""

    loaded: set[str]
    said: str


@pytest.fixture(scope="module")
def after() -> dict[str, After]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([row.code for row in ROWS]),
        capture_output=True,
        text=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{ROWS[len(found)].name}: {done.stderr}"
    return {
        row.name: After(set(loaded), said) for row, (loaded, said) in zip(ROWS, found, strict=True)
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_nothing_heavy_is_loaded(row, after):
    assert not after[row.name].loaded & row.shuns


def test_what_is_loaded_can_be_seen(after):
    assert "jaxllm" in after["jaxllm"].loaded and "jax" in after["making a checkpoint"].loaded
    assert "transformers" in after["loading a tokenizer"].loaded


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_is_its_own(name, after):
    assert f"usage: jaxllm {name}" in after[f"{name} --help"].said
