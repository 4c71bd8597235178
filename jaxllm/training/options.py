"""The options of a training run. `jaxllm train` has a flag for every field."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from jaxllm.config import option
from jaxllm.errors import ValidationError, refused
from jaxllm.files import read_json


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data"""

    data: tuple[str, ...] = option((), "Files and folders of text (.py, .rst, .txt, .md).")
    exclude: tuple[str, ...] = option((), "Patterns of names below those folders to leave out.")
    heldout_share: float = option(0.05, "Share of the files, by name, that is only measured.")
    chat_examples: bool = option(
        True, "Make conversations of the functions in Python sources, in the chat template's form."
    )
    tokenizer: str | None = option(
        None, "Model directory whose tokenizer to use (default: train one on the data)."
    )
    vocab_size: int = option(4096, "Tokens of a tokenizer that is trained.")


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """Shape of the model"""

    hidden_size: int = option(256, "Width of the residual stream.")
    intermediate_size: int = option(1024, "Width of the MLP.")
    num_layers: int = option(4, "Decoder layers.")
    num_heads: int = option(4, "Query heads.")
    num_kv_heads: int = option(2, "Key and value heads.")
    head_size: int = option(64, "Width of a head.")
    max_model_len: int = option(1024, "Longest sequence that the model is made for, in tokens.")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Run"""

    steps: int | None = option(None, "End after this many steps.")
    minutes: float | None = option(
        None,
        "End after this many minutes, with all that a run does: also to prepare and to export.",
    )
    batch_size: int = option(2, "Rows of a step.")
    context: int = option(1024, "Tokens of a row.")
    learning_rate: float = option(1.5e-3, "Highest learning rate.")
    table_rate: float = option(0.1, "What embedding and head have of the learning rate.")
    warmup_steps: int = option(50, "Steps in which it rises.")
    decay_share: float = option(0.4, "Last share of the run, in which it falls to zero.")
    weight_decay: float = option(0.1, "Decay of matrices.")
    max_grad_norm: float = option(1.0, "Longer gradients are cut to this length.")
    seed: int = option(0, "Of the first weights and of the order of the data.")
    bigram_steps: int = option(
        50,
        "Steps, over all bigrams at once, that first embeddings are fitted in; 0: they are random.",
    )
    initial_model: str | None = option(None, "Model directory whose weights to begin with.")
    save_steps: int = option(100, "Steps from checkpoint to checkpoint.")
    keep_checkpoints: int = option(2, "Checkpoints to keep.")
    eval_steps: int = option(100, "Steps from one measurement of the held-out text to the next.")
    eval_rows: int = option(32, "Rows of held-out text in such a measurement.")


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """Distillation"""

    teacher: str | None = option(None, "Model directory of a teacher with the same tokenizer.")
    teacher_weight: float = option(0.5, "Share of the teacher in the loss; the text has the rest.")
    temperature: float = option(1.0, "Temperature at which student and teacher are compared.")


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapter (LoRA)"""

    lora: str | None = option(
        None, "Model, such as 'bundled', of which to train an adapter in place of a whole model."
    )
    lora_rank: int = option(16, "Rank of its matrices.")
    lora_alpha: int = option(32, "Its factor, times the rank.")
    lora_targets: tuple[str, ...] = option(
        (), "Last names of the layers that it changes, such as q_proj (default: all linear ones)."
    )


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """All options of a run, and its folder."""

    output: str
    data: DataOptions = DataOptions()
    shape: ShapeOptions = ShapeOptions()
    run: RunOptions = RunOptions()
    teacher: TeacherOptions = TeacherOptions()
    adapter: AdapterOptions = AdapterOptions()

    @classmethod
    def of_folder(cls, output: str, given: Mapping[str, Mapping[str, Any]]) -> "TrainOptions":
        """Options of a new run, or of the run in that folder with the given options replaced. The
        given ones are by part and name."""
        stored = _read(Path(output) / _FILE)
        return cls(
            output=output,
            **{
                name: part(**{**stored.get(name, {}), **given.get(name, {})})
                for name, part in PARTS.items()
            },
        )

    def keep(self) -> None:
        """Write the options to the folder. Those that made its data and model cannot change."""
        path = Path(self.output) / _FILE
        stored = _read(path)
        new = {name: dataclasses.asdict(getattr(self, name)) for name in PARTS}
        for part, name in _FIXED:
            before = stored.get(part, {}).get(name, new[part][name])
            if before != new[part][name]:
                raise refused(
                    name,
                    new[part][name],
                    f"the run in {self.output} has {before!r}; give that, or another folder",
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")

    def validate(self) -> None:
        """Refuse values that are invalid for any data."""
        run = self.run
        if run.steps is None and run.minutes is None:
            raise ValidationError("a run needs an end; give steps or minutes", parameter="steps")
        for part in (self.data, self.shape, run, self.teacher, self.adapter):
            for f in dataclasses.fields(part):
                value = getattr(part, f.name)
                if isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                if not math.isfinite(value) or value < 0 or (value == 0 and f.name not in _MAYBE_0):
                    raise refused(f.name, value, "it must be a number above zero")
        for part, name in ((run, "decay_share"), (self.teacher, "teacher_weight")):
            if getattr(part, name) > 1:
                raise refused(name, getattr(part, name), "it is a share, at most 1")
        if self.adapter.lora is not None and run.initial_model is not None:
            raise refused("lora", self.adapter.lora, "initial_model is for whole models")
        if self.shape.num_heads % self.shape.num_kv_heads:
            raise refused(
                "num_kv_heads",
                self.shape.num_kv_heads,
                f"it must divide num_heads={self.shape.num_heads}",
            )
        if run.context > self.shape.max_model_len:
            raise refused(
                "context", run.context, f"max_model_len={self.shape.max_model_len}; raise that"
            )


PARTS = {name: hint for name, hint in get_type_hints(TrainOptions).items() if hint is not str}

_FILE = "options.json"
_FIXED = [
    *(("data", f.name) for f in dataclasses.fields(DataOptions)),
    *(("shape", f.name) for f in dataclasses.fields(ShapeOptions)),
    *(("adapter", f.name) for f in dataclasses.fields(AdapterOptions)),
    *(("run", name) for name in ("seed", "initial_model")),
]
_MAYBE_0 = {
    "heldout_share", "weight_decay", "warmup_steps", "decay_share", "seed", "teacher_weight",
    "bigram_steps",
}  # fmt: skip


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The stored options by part and name; none if there is no run."""
    if not path.exists():
        return {}
    parts = read_json(path)
    return {
        part: {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
        for part, options in parts.items()
    }
