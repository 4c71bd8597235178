"""A tiny model, an engine for it, and a folder to run batches in."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.main import main
from jaxllm.config import EngineConfig
from jaxllm.frontend.llm_engine import LLMEngine
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY, as_flags


@pytest.fixture(scope="session")
def engine_options(tmp_path_factory) -> dict[str, Any]:
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("batch") / "model")
    return TINY | {"model": str(model)}


@pytest.fixture(scope="session")
def flags(engine_options) -> list[str]:
    return as_flags(engine_options)


@pytest.fixture(scope="session")
def engine(engine_options) -> LLMEngine:
    return LLMEngine(EngineConfig.create(**engine_options))


class Bench:
    """A folder with the input and the outputs of a batch, and the command for it."""

    def __init__(self, folder: Path, flags: list[str]):
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.error_file, self.journal = folder / "out.errors.jsonl", folder / "out.jsonl.journal"
        self.argv = ["run-batch", "-i", str(self.input), "-o", str(self.output), *flags]

    def write(self, *lines: Any) -> None:
        """Write the input; write bytes unchanged."""
        encoded = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines]
        self.input.write_bytes(b"".join(line + b"\n" for line in encoded))

    def run(self, *more: str) -> int:
        return main([*self.argv, *more])

    def answers(self) -> list[Any]:
        return read_lines(self.output)

    def errors(self) -> list[Any]:
        return read_lines(self.error_file)


@pytest.fixture
def bench(tmp_path, flags) -> Bench:
    return Bench(tmp_path, flags)


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
