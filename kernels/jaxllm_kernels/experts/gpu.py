"""The experts on Hopper GPUs, in two Pallas Mosaic GPU kernels per layer.

Both are products of rows with the matrices of their experts (`gpu_product`): gate and up, or up
alone, with the activation, then down. What an expert has beside its product is in the kernel:
biases, clamps, the activation. XLA arranges the rows (`gpu_tiles`), and adds up a token's outputs
in the order of their experts.

Up to 16 tokens need no arranging: every expert that any of them chose multiplies all of them, and
what it computes for others is not read. More tokens are gathered, expert by expert.

Sizes, of a device: rows, and inputs and outputs of the matrices, are cut in pieces of 64, so F and
D must be multiples of 64. Experts that stay whole, on one device or on several, are:

    | model           |    D |     F | F on 2, 4 and 8 devices that cut experts |
    |-----------------|------|-------|------------------------------------------|
    | Qwen3-30B-A3B   | 2048 |   768 | 384, 192; 96 is refused                  |
    | Qwen3-235B-A22B | 4096 |  1536 | 768, 384, 192                            |
    | Mixtral-8x7B    | 4096 | 14336 | 7168, 3584, 1792                         |
    | gpt-oss         | 2880 |  2880 | 1440, 720 and 360 are refused            |
    | Nemotron 3 Nano | 2688 |  1856 | 928, 464 and 232 are refused             |

What is refused takes XLA's form; expert parallelism has no such limit.

Roofline: every chosen expert is read once, 3 x F x D elements or without a gate 2 x F x D, however
many rows it has. Beside it are the rows: gathered, read for each 64 or 128 outputs from L2, and
written in float32 once for each choice.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.coded import CodeForm
from jaxllm_kernels.compat import gpu_interpret_params, why_no_mosaic_gpu
from jaxllm_kernels.experts.api import ExpertsConfig, ExpertWeights, between
from jaxllm_kernels.experts.gpu_tiles import Tiles, share_rows, sort_rows
from jaxllm_kernels.platform import Chip

# The sizes of an expert on a device must be multiples of this.
_PIECE = 64
# A tile has as many rows as a matrix instruction, within bounds that leave room for a ring.
_FEWEST_ROWS, _MOST_ROWS = 8, 128
# The most tokens of which every chosen expert multiplies all.
_MOST_SHARED = 16
# The fewest rows of a tile with which two warpgroups multiply. With fewer the time is that of
# reading weights, and smaller items divide it better among the workers.
_FEWEST_ROWS_OF_TWO = 32


@dataclass(frozen=True)
class MosaicExperts:
    """`api.ExpertsOp` by Mosaic GPU kernels for Hopper (sm_90)."""

    name: str = "mosaic_sm90"
    # Thread blocks of the kernels: the multiprocessors of an H100 or H200 (SXM).
    num_workers: int = 132
    # Devices that have some of the experts each: so many more choices than rows are expected.
    num_devices: int = 1
    # Emulate the kernels on a CPU, with a race detector: for tests.
    interpret: bool = False

    def tuned_for(self, chip: Chip) -> "MosaicExperts":
        """Use one thread block for each multiprocessor, if the chip's number is known."""
        if self.interpret or chip.num_cores == 1:
            return self
        return dataclasses.replace(self, num_workers=chip.num_cores)

    def check(self, size: int, hidden_size: int, dtype: DTypeLike, chip: Chip) -> None:
        """Raise ValueError if the kernels do not compute experts of these sizes, as on one
        device."""
        # Check the chip first: another version of JAX would not help an A100.
        if not (self.interpret or chip.is_hopper):
            raise ValueError(f"it runs on Hopper GPUs (compute capability 9.0), not on {chip.name}")
        if why := why_no_mosaic_gpu():
            raise ValueError(f"it {why}")
        if jnp.dtype(dtype).itemsize != 2:
            raise ValueError(f"it computes in 16 bits, not in {jnp.dtype(dtype).name}")
        for what, number in (("size of an expert", size), ("hidden_size", hidden_size)):
            if number % _PIECE:
                raise ValueError(f"the {what} on a device, {number}, is not a multiple of {_PIECE}")

    def held(self, form: CodeForm, num_outputs: int, num_inputs: int) -> CodeForm:
        raise ValueError("it multiplies by weights of 16 or 32 bits only")

    def __call__(
        self,
        x: jax.Array,
        chosen: jax.Array,
        factors: jax.Array,
        weights: ExpertWeights,
        *,
        config: ExpertsConfig,
    ) -> jax.Array:
        num_tokens, num_choices = chosen.shape
        num_experts = weights.num_experts
        # A token's choices in the order of their experts.
        chosen, factors = jax.lax.sort((chosen, factors), dimension=1, num_keys=1, is_stable=False)
        shares_rows = num_tokens <= _MOST_SHARED and not config.scales_input
        if shares_rows:
            tile_rows = _tile_rows(num_tokens)
            tiles = share_rows(chosen, num_experts, tile_rows)
            rows = jnp.pad(x, ((0, tile_rows - num_tokens), (0, 0)))
        else:
            mean = num_tokens * num_choices // (num_experts * self.num_devices)
            tile_rows = _tile_rows(mean)
            tiles = sort_rows(chosen, num_experts, tile_rows)
            assert tiles.choices is not None
            rows = x[tiles.choices // num_choices]
            if config.scales_input:
                factor = factors.reshape(-1)[tiles.choices][:, None]
                rows = (rows * factor).astype(x.dtype)
        outputs = self._run(rows, tiles, weights, config, tile_rows, shares_rows)

        is_expert = (chosen >= 0) & (chosen < num_experts)
        sums = jnp.zeros(x.shape, jnp.float32)
        for choice in range(num_choices):
            output = outputs.at[tiles.rows[:, choice]].get(mode="clip")
            if not config.scales_input:
                output = output * factors[:, choice, None]
            # Rows of no expert were never written.
            sums = sums + jnp.where(is_expert[:, choice, None], output, 0)
        return sums

    def _run(
        self,
        rows: jax.Array,
        tiles: Tiles,
        weights: ExpertWeights,
        config: ExpertsConfig,
        tile_rows: int,
        shares_rows: bool,
    ) -> jax.Array:
        """The outputs of the experts, float32 [tiles * R, D]."""
        # Importing Mosaic takes long, and not every JAX has it.
        from jaxllm_kernels.experts.gpu_product import OUTPUTS, Product

        most_groups = 2 if tile_rows >= _FEWEST_ROWS_OF_TWO else 1

        def product(num_outputs: int, **kind: Any) -> Product:
            return Product(
                tile_rows=tile_rows,
                num_groups=most_groups if num_outputs % (most_groups * OUTPUTS) == 0 else 1,
                num_workers=self.num_workers,
                interpret=gpu_interpret_params() if self.interpret else False,
                **kind,
            )

        def halves_of(
            rows: jax.Array,
            matrices: jax.Array,
            bias: jax.Array | None,
            finish: Callable[[Any], Any],
            **kind: Any,
        ) -> jax.Array:
            """The outputs [rows, N] of matrices [E, N, K]: two halves of them at a time, where both
            have whole pieces."""
            num_experts, num_outputs, num_inputs = matrices.shape
            parts = 2 if num_outputs % (2 * OUTPUTS) == 0 else 1
            part_size = num_outputs // parts
            multiply = product(
                part_size,
                finish=lambda products: [finish(half) for half in products],
                num_finished=parts,
                **kind,
            )
            outputs = multiply(
                rows,
                matrices.reshape(num_experts, parts, part_size, num_inputs),
                None if bias is None else bias.reshape(num_experts, parts, part_size),
                tiles.experts,
                tiles.ends,
            )
            return outputs.reshape(-1, num_outputs)

        gate_up_weights, down_weights = weights.arrays
        gate_up_bias = weights.gate_up_bias
        size = down_weights.shape[2]
        first: dict[str, Any] = dict(out_dtype=rows.dtype, shares_rows=shares_rows)
        if config.is_gated:
            gate_up = product(
                size,
                name="experts_gate_up",
                finish=lambda halves: [between(halves, config)],
                num_finished=1,
                **first,
            )
            inner = gate_up(rows, gate_up_weights, gate_up_bias, tiles.experts, tiles.ends)
        else:
            inner = halves_of(
                rows,
                gate_up_weights.squeeze(1),
                None if gate_up_bias is None else gate_up_bias.squeeze(1),
                lambda half: between([half], config),
                name="experts_up",
                **first,
            )
        return halves_of(
            inner.reshape(-1, size),
            down_weights,
            weights.down_bias,
            lambda half: half,
            name="experts_down",
            out_dtype=jnp.float32,
        )


def _tile_rows(number: int) -> int:
    """The power of two that is at least a number of rows, within bounds."""
    power = 1 << (number - 1).bit_length() if number > 1 else 1
    return min(max(power, _FEWEST_ROWS), _MOST_ROWS)
