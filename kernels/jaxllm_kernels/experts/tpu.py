"""The experts on TPUs: two Pallas kernels, one for few tokens and one for many.

Both read the weights as checkpoints have them, in the layout in which XLA keeps them. They cut an
expert by its outputs only, so sizes need not be multiples of anything, and no weights are copied.
Weights may be codes of 8 bits.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.coded import CodedWeight, CodeForm
from jaxllm_kernels.common import cdiv
from jaxllm_kernels.experts.api import ExpertsConfig, ExpertWeights
from jaxllm_kernels.experts.tpu_sizes import (
    Blocks,
    ManySizes,
    Stored,
    choose_blocks,
    choose_few,
    choose_many,
    few_tokens,
    many_sizes,
)
from jaxllm_kernels.platform import CHIPS, Chip
from jaxllm_kernels.tpu_product import LANES, check_codes


class Tuning(NamedTuple):
    """Sizes in place of those that follow from the chip; tests make them small."""

    few_tokens: int
    block_bytes: int
    call_tokens: int
    item_rows: int
    tile_rows: int


@dataclass(frozen=True, kw_only=True)
class TpuExperts:
    """`api.ExpertsOp` on TPUs.

    XLA cannot partition a Pallas call: with several devices, call it within a shard_map.
    """

    # The chip to compile for, or to emulate.
    chip: str
    name: str = "tpu"
    tuning: Tuning | None = None
    # Whether codes e2m1 with powers of two are held as float8, as by `dense.xla.XlaCodedMatmul`.
    mx_by_output: bool = False
    # Emulate the kernels on a CPU, with a race detector.
    interpret: bool = False

    def check(
        self,
        *,
        num_experts: int,
        num_choices: int,
        num_tokens: int,
        num_halves: int,
        size: int,
        hidden_size: int,
        dtype: DTypeLike,
        are_codes: bool = False,
    ) -> None:
        """Raise ValueError if the kernels do not compute such experts, as on one device, for up to
        so many tokens of a dtype. `num_halves` is 2 if they have gates, or 1."""
        chip = self._chip
        if not chip.vmem_bytes:
            raise ValueError(f"the chip {chip.name!r} is not known")
        name = jnp.dtype(dtype).name
        if name not in ("bfloat16", "float32"):
            raise ValueError(f"dtype={name!r} is not bfloat16 or float32")
        stored = Stored(dtype)
        if are_codes:
            # With the most scales.
            stored = Stored(jnp.int8, cdiv(hidden_size, LANES), cdiv(size, LANES))
        of_expert = (num_halves, size, hidden_size, stored, dtype, chip)
        choose_few(min(num_tokens, few_tokens(chip)), num_choices, *of_expert)
        choose_many(num_tokens, num_choices, num_experts, *of_expert)

    def held(self, form: CodeForm, num_outputs: int, num_inputs: int) -> CodeForm:
        if self.mx_by_output and form.scale_dtype == "float8_e8m0fnu" and form.bits == 4:
            return CodeForm(codes="float8_e4m3fn")
        check_codes(form, num_inputs)
        return form

    def __call__(
        self,
        x: jax.Array,
        chosen: jax.Array,
        factors: jax.Array,
        weights: ExpertWeights,
        *,
        config: ExpertsConfig,
    ) -> jax.Array:
        # Importing Pallas takes long, and other platforms do not need it.
        from jaxllm_kernels.experts.tpu_few import run_few
        from jaxllm_kernels.experts.tpu_many import run_many

        num_tokens = len(x)
        shared = {"config": config, "interpret": self._interpreter()}
        if num_tokens <= self._few_tokens:
            blocks = self._few_blocks(chosen, weights, x.dtype)
            return run_few(x, chosen, factors, weights, blocks=blocks, **shared)
        call_tokens, sizes, blocks = self._many_sizes(chosen, weights, x.dtype)
        sums = []
        for start in range(0, num_tokens, call_tokens):
            here = slice(start, start + call_tokens)
            sums.append(
                run_many(
                    x[here],
                    chosen[here],
                    factors[here],
                    weights,
                    blocks=blocks,
                    sizes=sizes,
                    **shared,
                )
            )
        return sums[0] if len(sums) == 1 else jnp.concatenate(sums)

    @property
    def _chip(self) -> Chip:
        return CHIPS.get(self.chip, Chip(name=self.chip, platform="tpu"))

    @property
    def _few_tokens(self) -> int:
        return few_tokens(self._chip) if self.tuning is None else self.tuning.few_tokens

    def _few_blocks(self, chosen: jax.Array, weights: ExpertWeights, dtype: DTypeLike) -> Blocks:
        _, hidden_size, size = weights.down.shape
        of_expert = (weights.num_halves, size, hidden_size, _stored(weights))
        if self.tuning is not None:
            return choose_blocks(*of_expert, self.tuning.block_bytes)
        num_tokens, num_choices = chosen.shape
        return choose_few(num_tokens, num_choices, *of_expert, dtype, self._chip)

    def _many_sizes(
        self, chosen: jax.Array, weights: ExpertWeights, dtype: DTypeLike
    ) -> tuple[int, ManySizes, Blocks]:
        num_experts, hidden_size, size = weights.down.shape
        of_expert = (weights.num_halves, size, hidden_size, _stored(weights))
        if self.tuning is not None:
            _, block_bytes, call_tokens, item_rows, tile_rows = self.tuning
            sizes = many_sizes(hidden_size, dtype, item_rows=item_rows, tile_rows=tile_rows)
            return call_tokens, sizes, choose_blocks(*of_expert, block_bytes)
        num_tokens, num_choices = chosen.shape
        return choose_many(num_tokens, num_choices, num_experts, *of_expert, dtype, self._chip)

    def _interpreter(self) -> Any:
        if not self.interpret:
            return False
        from jax.experimental.pallas import tpu as pltpu

        # A copy is done when it starts: a missing wait is a race, which is found.
        return pltpu.InterpretParams(
            detect_races=True,
            dma_execution_mode="eager",
            num_cores_or_threads=self._chip.num_cores,
        )


def _stored(weights: ExpertWeights) -> Stored:
    gate_up, down = weights.gate_up, weights.down
    if isinstance(gate_up, CodedWeight) and isinstance(down, CodedWeight):
        return Stored(gate_up.codes.dtype, gate_up.num_groups, down.num_groups)
    return Stored(weights.arrays[0].dtype)
