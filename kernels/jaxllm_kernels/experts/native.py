"""The experts on CPUs, in C++: one call of the library of native kernels per layer."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm_kernels.coded import CodeForm
from jaxllm_kernels.experts.api import ExpertsConfig, ExpertWeights
from jaxllm_kernels.native.library import Library

# The most inputs that an accumulator takes at a time.
_STEP = 32


@dataclass(frozen=True)
class NativeExperts:
    """`api.ExpertsOp` by the native library."""

    library: Library
    name: str = "native"

    def check(self, size: int, hidden_size: int, dtype: DTypeLike) -> None:
        """Raise ValueError if the kernel does not compute experts of these sizes, as on one
        device."""
        name = jnp.dtype(dtype).name
        if name not in self.library.dtypes:
            raise ValueError(f"dtype={name!r} is not one of {', '.join(self.library.dtypes)}")
        for what, number in (("size of an expert", size), ("hidden_size", hidden_size)):
            if number % _STEP:
                raise ValueError(f"the {what} on a device, {number}, is not a multiple of {_STEP}")

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
        if config.scales_input:
            return self._with_scaled_inputs(x, chosen, factors, weights, config)
        (num_tokens, hidden_size), num_choices = x.shape, chosen.shape[1]
        size = weights.down.shape[2]
        bias, down_bias = weights.gate_up_bias, weights.down_bias
        call = jax.ffi.ffi_call(
            self.library.target("jaxllm_experts", x.dtype),
            (
                jax.ShapeDtypeStruct(x.shape, jnp.float32),
                # Memory between the two steps of the kernel.
                jax.ShapeDtypeStruct((num_tokens * num_choices, size), x.dtype),
            ),
        )
        y, _ = call(
            x,
            chosen,
            factors,
            weights.gate_up,
            weights.down,
            jnp.zeros((0, 2, size), x.dtype) if bias is None else bias,
            jnp.zeros((0, hidden_size), x.dtype) if down_bias is None else down_bias,
            slope=np.float32(config.gate_slope),
            offset=np.float32(config.up_offset),
            limit=np.float32(config.limit or 0),
        )
        return y

    def _with_scaled_inputs(
        self,
        x: jax.Array,
        chosen: jax.Array,
        factors: jax.Array,
        weights: ExpertWeights,
        config: ExpertsConfig,
    ) -> jax.Array:
        """Compute each choice as a token of its own. Such models have few choices."""
        order = jnp.argsort(chosen, axis=1, stable=True)
        chosen, factors = (jnp.take_along_axis(a, order, axis=1) for a in (chosen, factors))
        rows = (x[:, None] * factors[:, :, None]).astype(x.dtype)
        config = ExpertsConfig(
            gate_slope=config.gate_slope, up_offset=config.up_offset, limit=config.limit
        )
        outputs = self(
            rows.reshape(-1, x.shape[1]),
            chosen.reshape(-1, 1),
            jnp.ones((chosen.size, 1), jnp.float32),
            weights,
            config=config,
        ).reshape(rows.shape)
        sums = outputs[:, 0]
        for choice in range(1, chosen.shape[1]):
            sums = sums + outputs[:, choice]
        return sums
