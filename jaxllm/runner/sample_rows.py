"""Samples one token for each row of a step, after the row's last one."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxllm_kernels.sampler.api import LogprobOutput

from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.sampling import row_params
from jaxllm.sampling.sampler import sample
from jaxllm.sampling.slot_state import SlotState
from jaxllm.scheduler.schedule import NO_TOKEN


class SampledRows(Protocol):
    """What sampling must know of a step's rows; fields as in StepInputs."""

    @property
    def slots(self) -> jax.Array: ...
    @property
    def samples(self) -> jax.Array: ...
    @property
    def prompt_lens(self) -> jax.Array: ...
    @property
    def row_params(self) -> jax.Array: ...


class Sampled(NamedTuple):
    """The tables of the state after sampling, and what was sampled."""

    tokens: jax.Array  # i32 [S]
    slots: SlotState
    of_rows: jax.Array  # i32 [R]; NO_TOKEN if the logits are not finite
    logprobs: LogprobOutput


def sample_rows(
    plan: EnginePlan,
    rows: SampledRows,
    logits: jax.Array,
    *,
    context_lens: jax.Array,
    tokens: jax.Array,
    slots: SlotState,
    masks: jax.Array | None = None,
) -> Sampled:
    """Sample the rows from their logits, and note their tokens in the tables."""
    sampled = sample(
        logits,
        row_params.decode(rows.row_params, plan.logits_processors),
        slots=rows.slots,
        samples=rows.samples,
        output_index=context_lens - rows.prompt_lens,
        positions=context_lens,
        state=slots,
        num_logprobs=plan.step_logprobs,
        layout=plan.sampling,
        processors=plan.logits_processors,
        vocab_size=plan.architecture.vocab_size,
        masks=masks,
    )
    kept = jnp.where(rows.samples, rows.slots, plan.max_num_seqs)
    return Sampled(
        tokens=tokens.at[kept].set(sampled.tokens, mode="drop"),
        slots=sampled.state,
        of_rows=jnp.where(sampled.is_valid, sampled.tokens, NO_TOKEN),
        logprobs=sampled.logprobs,
    )
