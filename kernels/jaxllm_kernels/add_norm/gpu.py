"""The sum and its norm on Hopper GPUs, in one launch: a thread block for each row.

XLA adds in a launch of its own. Or it adds in the launch of the norm, and then does not write the
sum: the next norm adds again, and the one after that, so that the last layer's would read the
outputs of all layers.

Roofline: two rows are read and two written, little enough to stay in the L2 between products.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxllm_kernels.add_norm.api import RMSNormConfig
from jaxllm_kernels.compat import gpu_interpret_params, store_unoptimized

_VECTOR = 4  # elements that a thread loads at once
_THREADS = 128
_LONGEST_ROW = 8192  # which is 64 elements in each thread


@dataclass(frozen=True)
class GpuAddNorm:
    """`api.AddNorm` in a Mosaic GPU kernel."""

    # Emulate the kernel on a CPU, with a race detector: for tests.
    interpret: bool = False

    def supports(self, size: int, dtype: DTypeLike) -> bool:
        is_whole = size % (_VECTOR * _THREADS) == 0
        return is_whole and size <= _LONGEST_ROW and jnp.dtype(dtype).itemsize == 2

    def __call__(
        self, stream: jax.Array, output: jax.Array, weight: jax.Array | None, config: RMSNormConfig
    ) -> tuple[jax.Array, jax.Array]:
        # Importing Mosaic takes long, and not every JAX has it.
        from jax.experimental.pallas import mosaic_gpu as plgpu

        num_rows, size = stream.shape
        layout = plgpu.Layout.WG_STRIDED((size,), vec_size=_VECTOR)

        def load(ref):
            return plgpu.load(ref, layout=layout).astype(jnp.float32)  # pyright: ignore[reportCallIssue]

        def kernel(stream_ref, output_ref, weight_ref: Any, total_ref, normal_ref):
            row = lax.axis_index("row")
            total = (load(stream_ref.at[row]) + load(output_ref.at[row])).astype(stream.dtype)
            store_unoptimized(total_ref.at[row], total)
            wide = total.astype(jnp.float32)
            mean_square = jnp.sum(wide * wide) * jnp.float32(1 / size)
            normal = wide * lax.rsqrt(mean_square + jnp.float32(config.eps))
            if weight_ref is not None:
                if config.rounds_first:
                    normal = normal.astype(stream.dtype).astype(jnp.float32)
                factor = load(weight_ref)
                normal = normal * (factor + config.offset if config.offset else factor)
            store_unoptimized(normal_ref.at[row], normal.astype(stream.dtype))

        rows = jax.ShapeDtypeStruct((num_rows, size), stream.dtype)
        total, normal = plgpu.kernel(
            kernel,
            out_type=(rows, rows),
            grid=(num_rows,),
            grid_names=("row",),
            interpret=gpu_interpret_params() if self.interpret else False,
            kernel_name="add_norm",
        )(stream, output, weight)
        return total, normal
