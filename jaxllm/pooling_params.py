"""What a pooling request wants of the hidden states of its prompt. The names are vLLM's."""

import typing
from typing import Any, Literal

import msgspec

from jaxllm.errors import refused

# One vector for a prompt, or one for each of its tokens: of the model, or of classes.
PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = typing.get_args(PoolingTask)

# What vLLM called tasks before, and what it calls them now.
_FORMER_TASKS = {
    "score": "'classify'",
    "encode": "'token_embed' or 'token_classify'",
    "reward": "'classify', or 'token_classify' for a score at every token",
}


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Pooling parameters. None means what the model does by default."""

    # Whether embeddings have the length 1, and whether classes have probabilities.
    use_activation: bool | None = None
    # How many of an embedding's numbers are kept: those of some models may be cut.
    dimensions: int | None = None
    task: PoolingTask | None = None
    # Of the vectors at each token those at tokens of this id: where a step of an answer ends.
    step_tag_id: int | None = None
    # Which scores are wanted: of tokens in a model that scores by their logits, else of classes.
    returned_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.use_activation, bool | None):
            raise refused("use_activation", self.use_activation, "it must be a bool or None")
        if isinstance(self.dimensions, bool) or not isinstance(self.dimensions, int | None):
            raise refused("dimensions", self.dimensions, "it must be an integer or None")
        if self.dimensions is not None and self.dimensions < 1:
            raise refused("dimensions", self.dimensions, "it must be at least 1")
        if self.task is not None:
            check_task("task", self.task)
        check_step("", self.step_tag_id, self.returned_token_ids)

    def clone(self, **changes: Any) -> "PoolingParams":
        """A validated copy, with some fields replaced."""
        return PoolingParams(**(msgspec.structs.asdict(self) | changes))


def check_step(prefix: str, step_tag_id: object, returned_token_ids: object) -> None:
    """Refuse what are no ids. `prefix` is of the names in errors."""
    if step_tag_id is not None and not _is_id(step_tag_id):
        raise refused(f"{prefix}step_tag_id", step_tag_id, "it must be the id of a token")
    given = returned_token_ids
    if given is None:
        return
    if not (isinstance(given, list | tuple) and given and all(map(_is_id, given))):
        raise refused(f"{prefix}returned_token_ids", given, "it must be a list of ids")
    if len(set(given)) < len(given):
        raise refused(f"{prefix}returned_token_ids", given, "each may be there once")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_task(name: str, task: object) -> None:
    """Refuse what is no task. A former name is answered with today's."""
    if task in _FORMER_TASKS:
        raise refused(name, task, f"it is now called {_FORMER_TASKS[str(task)]}")
    if task not in POOLING_TASKS:
        raise refused(name, task, f"it must be {' or '.join(map(repr, POOLING_TASKS))}")
