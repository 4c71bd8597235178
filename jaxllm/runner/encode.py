"""The program of the tower: it turns images into embeddings, in the pool of the device state.

    encode(weights, state, numbers, pixels) -> state

It is dispatched before the first step that needs the images.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxllm.media.device import EncoderLayout
from jaxllm.models.tower import Images
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.stages import StagePlan
from jaxllm.runner.state import DeviceState


def make_encode(
    plan: EnginePlan,
    stage: StagePlan,
    merge: Callable[[list[jax.Array]], Any],
    layout: EncoderLayout,
) -> Callable[..., DeviceState]:
    """Make the program of so many patches. The caller jits it and donates the state. `merge` makes
    the model of its weights."""
    images = plan.images
    assert images is not None, "the engine sees no images"
    ops = images.ops[layout.num_patches]

    def encode(
        weights: list[jax.Array], state: DeviceState, numbers: jax.Array, pixels: jax.Array
    ) -> DeviceState:
        with jax.named_scope("images"):
            its = layout.unpack(numbers, pixels)
            made = Images(its.pixels, its.places, its.starts)
            model = merge(weights)
            mesh = stage.mesh if model.cuts_tower else None
            embedded = model.tower(made, ops, mesh)
            assert state.given is not None
            pool = state.given.at[its.rows].set(embedded.astype(plan.dtype), mode="drop")
        return dataclasses.replace(state, given=pool)

    return encode
