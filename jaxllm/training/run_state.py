"""The files of a run, from which it can resume: checkpoints and the log.

OUTPUT/options.json       the options
OUTPUT/data/              token ids and the manifest of files
OUTPUT/checkpoints/STEP/  weights, optimizer, elapsed seconds; an incomplete one has another name
OUTPUT/log.jsonl          a line for every step
OUTPUT/model/             the checkpoint to serve, with the tokenizer
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import orbax.checkpoint as ocp


class Restored(NamedTuple):
    step: int  # number of finished steps
    seconds: float  # their duration
    state: Any


class Checkpoints:
    """The last few states of a run. `save` returns when the state is on disk, and is atomic."""

    def __init__(self, folder: Path, keep: int):
        self._manager = ocp.CheckpointManager(
            folder.resolve(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=False,
                # Removes incomplete checkpoints of a killed run.
                cleanup_tmp_directories=True,
            ),
            item_names=("state", "progress"),
        )

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, seconds: float, state: Any) -> None:
        if self.latest_step == step:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave({"seconds": seconds})
            ),
        )

    def restore(self, like: Any) -> Restored | None:
        """Return the latest state, if any, with the structure and dtypes of `like`."""
        step = self.latest_step
        if step is None:
            return None
        found = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(like), progress=ocp.args.JsonRestore()
            ),
        )
        return Restored(step, found["progress"]["seconds"], found["state"])

    def close(self) -> None:
        self._manager.close()


class Log:
    """A JSON line for every step. A repeated step replaces its earlier line."""

    def __init__(self, path: Path, *, first_step: int):
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                # The last line of a killed run may be incomplete.
                if line.endswith("\n") and json.loads(line)["step"] <= first_step:
                    kept.append(line)
        path.write_text("".join(kept), encoding="utf-8")
        self._file = open(path, "a", encoding="utf-8", buffering=1)

    def write(self, **record: float) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()
