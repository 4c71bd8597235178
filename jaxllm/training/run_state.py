"""What a run keeps on disk, and goes on from: checkpoints and the log.

OUTPUT/options.json       what was asked
OUTPUT/data/              token ids and the manifest of files
OUTPUT/checkpoints/STEP/  weights, optimizer, seconds spent; a half-written one has another name
OUTPUT/log.jsonl          a line for every step
OUTPUT/model/             the checkpoint to serve, with the tokenizer
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import orbax.checkpoint as ocp


class Restored(NamedTuple):
    step: int  # steps that are done
    seconds: float  # that they took
    state: Any


class Checkpoints:
    """The last few states of a run. Saving is done when it returns, whole or not at all."""

    def __init__(self, folder: Path, keep: int):
        self._manager = ocp.CheckpointManager(
            folder.resolve(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=False,
                # What a killed run left half-written.
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
        """The latest state, if there is one, with the structure and types of `like`."""
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
    """JSON lines, one for every step; of steps that are done again only the last."""

    def __init__(self, path: Path, *, first_step: int):
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                # The last line of a killed run may be torn.
                if line.endswith("\n") and json.loads(line)["step"] <= first_step:
                    kept.append(line)
        path.write_text("".join(kept), encoding="utf-8")
        self._file = open(path, "a", encoding="utf-8", buffering=1)

    def write(self, **record: float) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()
