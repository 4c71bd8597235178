"""Whether an engine generates or pools, and how: what a user asks for and what the plan decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jaxllm.errors import ValidationError, refused, shown
from jaxllm.option_types import option
from jaxllm.pooling_params import PoolingTask, check_step, check_task

# Which hidden state stands for a prompt: that of the first token, that of the last, or the mean.
SeqPooling = Literal["CLS", "LAST", "MEAN"]
# Of the hidden states of tokens: all, or those where a step of an answer ends.
TokPooling = Literal["ALL", "STEP"]


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """Pooling"""

    runner: Literal["auto", "generate", "pooling"] = option(
        "auto",
        "Whether the engine generates text or pools hidden states to embeddings, scores and "
        "classes; 'auto' follows the model's files.",
    )
    convert: Literal["auto", "none", "embed", "classify"] = option(
        "auto", "What a model that generates text becomes in an engine that pools."
    )
    pooler_config: Mapping[str, Any] | None = option(
        None,
        "JSON object of what is otherwise read from the model's files: task, pooling_type (CLS, "
        "LAST, MEAN, or STEP with step_tag_id and returned_token_ids), use_activation, dimensions.",
    )

    def read(self) -> "PoolerConfig":
        """The fields of `pooler_config`, checked."""
        given = dict(self.pooler_config or {})
        for name in given.keys() - set(PoolerConfig.__struct_fields__):
            fields = ", ".join(PoolerConfig.__struct_fields__)
            raise ValidationError(
                f"pooler_config: {name:.80} is unknown; its fields are {fields}",
                parameter="pooler_config",
            )
        return PoolerConfig(**given)


class PoolerConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How the model's hidden states are pooled; None leaves it to the model's files."""

    task: PoolingTask | None = None  # of requests that name none
    pooling_type: SeqPooling | TokPooling | None = None  # a shorter name of the next two
    seq_pooling_type: SeqPooling | None = None
    tok_pooling_type: TokPooling | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None  # of requests that name none
    returned_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        if self.task is not None:
            check_task("pooler_config.task", self.task)
        for name, known in (
            ("pooling_type", ("CLS", "LAST", "MEAN", "ALL", "STEP")),
            ("seq_pooling_type", ("CLS", "LAST", "MEAN")),
            ("tok_pooling_type", ("ALL", "STEP")),
        ):
            if (value := getattr(self, name)) not in (None, *known):
                raise refused(f"pooler_config.{name}", value, f"give one of {', '.join(known)}")
        check_step("pooler_config.", self.step_tag_id, self.returned_token_ids)
        if not isinstance(self.use_activation, bool | None):
            raise refused("pooler_config.use_activation", self.use_activation, "give a bool")
        whole = isinstance(self.dimensions, int) and not isinstance(self.dimensions, bool)
        if self.dimensions is not None and not (whole and self.dimensions > 0):
            raise refused("pooler_config.dimensions", self.dimensions, "give a positive integer")

    @property
    def of_sequences(self) -> SeqPooling | None:
        short = self.pooling_type
        return self.seq_pooling_type or (None if short in ("ALL", "STEP") else short)

    @property
    def of_tokens(self) -> TokPooling | None:
        short = self.pooling_type
        return self.tok_pooling_type or (short if short in ("ALL", "STEP") else None)


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that pools makes of its prompts. The frontend finishes what it brings: it cuts
    and normalises vectors, and makes probabilities of the scores of classes."""

    # Of a prompt, and of each of its tokens.
    tasks: tuple[PoolingTask, PoolingTask]
    default_task: PoolingTask
    seq_pooling: SeqPooling
    size: int  # numbers of a vector
    activation: Literal["normalize", "softmax", "sigmoid", "none"]
    use_activation: bool = True  # by default
    # How many numbers an embedding may have instead: any of these, or any number if `may_be_cut`.
    may_be_cut: bool = False
    cuts: tuple[int, ...] = ()
    dimensions: int | None = None  # by default; None: all
    labels: tuple[str, ...] = ()  # of the classes
    # What is put before a text, by the name of its purpose.
    prompts: tuple[tuple[str, str], ...] = ()
    # Tokens see those behind them, too: a prompt is computed in one step, and nothing is cached.
    sees_all: bool = False
    num_token_types: int = 0
    # Of requests for vectors of tokens, whether they may ask for those at steps; and where these
    # end, and which scores there are wanted, by default.
    tok_pooling: TokPooling = "ALL"
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    # The tokens whose logits the scores are; empty: they are of classes, or numbers of a vector.
    scored_tokens: tuple[int, ...] = ()

    @property
    def is_embedding(self) -> bool:
        return "embed" in self.tasks

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether a prompt's vector needs all of its tokens, so that none may come from a cache."""
        return self.seq_pooling != "LAST"

    def columns(self, wanted: Sequence[int]) -> list[int]:
        """The places in a vector of these tokens, or of classes."""
        known = self.scored_tokens or range(self.size)
        for one in wanted:
            if one not in known:
                raise refused(
                    "returned_token_ids",
                    list(wanted),
                    f"there are scores of {shown(list(known))}"
                    if self.scored_tokens
                    else f"there are {self.size} numbers, from 0 on",
                )
        return [known.index(one) for one in wanted]

    def check_dimensions(self, asked: int) -> None:
        """Refuse a number of dimensions that embeddings of this model cannot have."""
        if not self.is_embedding:
            raise refused("dimensions", asked, "the model classifies; only embeddings can be cut")
        if not self.may_be_cut and not self.cuts and asked != self.size:
            raise refused(
                "dimensions",
                asked,
                f"embeddings of this model have {self.size} numbers, and nothing says that they "
                "may be cut; if they may, start with hf_overrides={'is_matryoshka': True}",
            )
        if asked > self.size:
            raise refused("dimensions", asked, f"the model has {self.size}")
        if self.cuts and asked not in (*self.cuts, self.size):
            raise refused(
                "dimensions", asked, f"it must be one of {shown(sorted({*self.cuts, self.size}))}"
            )
