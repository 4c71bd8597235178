"""What a step leaves for the host."""

from dataclasses import dataclass

import jax
from jaxllm_kernels.sampler.api import LogprobOutput

from jaxllm.runner.verified_states import Kept


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedOutputs:
    """What speculation adds, by row (padding rows included)."""

    # i32 [R, 2 + k]: how many tokens are proposed for the next step, how many drafts of this one
    # are accepted, and the tokens sampled after the first, of which the accepted ones count. In a
    # program without rows with drafts k is 0.
    figures: jax.Array
    logprobs: LogprobOutput | None  # [R * k, 1 + n], of these tokens
    # i32 [R, most drafts]: what is proposed, then NO_DRAFT. Only of late rows.
    proposals: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """What a step leaves for the host, by row (padding rows included)."""

    tokens: jax.Array  # i32 [R]; NO_TOKEN if the logits are not finite
    # [R, 1 + k]; zeros when no row asked. None in an engine that pools.
    logprobs: LogprobOutput | None
    slices: dict[str, dict[str, jax.Array]]  # of the features in this program
    # f32 [R, V], after each row's last token; only if requests may want more than k logprobs.
    # To leave the logits costs nothing: they stay on the device unless a row wants that many.
    logits: jax.Array | None
    drafted: DraftedOutputs | None = None  # only in an engine that speculates
    # What layers with states have kept of drafts, for those of late rows; only where rows may have
    # drafts.
    kept: Kept = ()
    # i32 [L, E]: the tokens of each expert of the layers of each stage; only if they are counted
    expert_tokens: tuple[jax.Array, ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutputs:
    """What a stage of a pipeline leaves for the next one."""

    hidden: jax.Array  # [T, D]
    expert_tokens: tuple[jax.Array, ...] = ()  # as of StepOutputs
