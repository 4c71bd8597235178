from pathlib import Path

import pytest

from jaxllm.training.options import DataOptions, RunOptions, ShapeOptions, TrainOptions

ROOT = Path(__file__).parents[2]

SMALL = ShapeOptions(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    max_model_len=128,
)


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A folder of a few sources; about one in five is held out."""
    folder = tmp_path_factory.mktemp("corpus") / "text"
    folder.mkdir()
    for path in sorted((ROOT / "jaxllm" / "scheduler").glob("*.py")):
        (folder / path.name).write_text(path.read_text())
    return folder


@pytest.fixture(scope="module")
def small_run(text, tmp_path_factory):
    """A function that makes options of a very short run: small_run("name", steps=5)."""
    runs = tmp_path_factory.mktemp("runs")

    def make(folder: str, *, data: dict | None = None, teacher=None, **run) -> TrainOptions:
        run = {
            "batch_size": 2,
            "context": 32,
            "warmup_steps": 2,
            "eval_rows": 4,
            "bigram_steps": 0,
            "table_rate": 1.0,
        } | run
        parts = {} if teacher is None else {"teacher": teacher}
        return TrainOptions(
            output=str(runs / folder),
            data=DataOptions(
                **{"data": (str(text),), "heldout_share": 0.2, "vocab_size": 320} | (data or {})
            ),
            shape=SMALL,
            run=RunOptions(**run),
            **parts,
        )

    return make
