"""The small programs of an engine that speculates: what drafts reads, or is told, beside steps."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.parallel.sharding import place, sharding
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.programs import writes
from jaxllm.programs.compile import Program
from jaxllm.runner.ahead import make_draft_ahead
from jaxllm.runner.draft_model import make_read
from jaxllm.runner.drafting import Drafting
from jaxllm.runner.packer import StepPacker
from jaxllm.runner.step import ModelSpec, make_drafting
from jaxllm.speculation.drafters import make_drafter

ADMIT_DRAFTS = "admit_drafts"
DRAFT_AHEAD = "draft_ahead"


class ReadKey(NamedTuple):
    """The key of the program in which a draft model reads so many tokens."""

    num_tokens: int

    def __str__(self) -> str:
        return f"read_draft {self.num_tokens}"


def num_drafting(plan: EnginePlan) -> int:
    """How many programs `declare_drafting` declares."""
    if plan.speculation is None:
        return 0
    reads = 0 if plan.draft_model is None else len(plan.draft_model.read_sizes)
    return plan.speculation.proposes + bool(plan.num_ahead_rows) + reads


def declare_drafting(
    plan: EnginePlan,
    packer: StepPacker,
    program: Callable[..., Program],
    weights: list[Any],
    state: Any,
    spec: ModelSpec,
    draft: ModelSpec | None,
) -> dict[Hashable, Program]:
    """Declare them. `program` makes one of a name, a function and its arguments; `weights` and
    `state` are those of a step, and `spec` and `draft` what they are the weights of."""
    assert plan.speculation is not None
    everywhere = sharding(plan.stages[0].mesh)
    kept = jax.tree.map(lambda leaf: leaf.sharding, state)
    programs: dict[Hashable, Program] = {}
    if plan.draft_model is not None:
        assert draft is not None
        for layout in reversed(packer.read_layouts.values()):
            programs[ReadKey(layout.num_tokens)] = program(
                f"read_draft_{layout.num_tokens}",
                make_read(plan, lambda its: draft.merge(its[spec.num_weights :]), layout),
                weights,
                state,
                place(layout.abstract(), everywhere),
                donate=(1,),
                out_shardings=kept,
            )
    if (ahead := packer.ahead_layout) is not None:

        def drafting(weights: list[jax.Array]) -> Drafting:
            assert draft is not None
            model = spec.merge(weights[: spec.num_weights])
            its = make_drafting(plan, model, draft.merge(weights[spec.num_weights :]))
            assert its is not None
            return its

        programs[DRAFT_AHEAD] = program(
            DRAFT_AHEAD,
            make_draft_ahead(drafting, ahead),
            weights,
            state,
            place(ahead.abstract(), everywhere),
            donate=(1,),
            out_shardings=(kept, everywhere),
        )
    if plan.speculation.proposes:
        programs[ADMIT_DRAFTS] = program(
            ADMIT_DRAFTS,
            functools.partial(writes.admit_drafts, make_drafter(plan.speculation)),
            state,
            place(jax.ShapeDtypeStruct((), np.int32), everywhere),
            place(jax.ShapeDtypeStruct((plan.max_model_len,), np.int32), everywhere),
            donate=(0,),
            out_shardings=kept,
        )
    return programs
