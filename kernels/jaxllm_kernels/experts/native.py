"""The experts on CPUs, in C++: one call of the library of native kernels per layer."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm_kernels.coded import CodedWeight, CodeForm
from jaxllm_kernels.experts.api import ExpertsConfig, ExpertWeights
from jaxllm_kernels.native.codes import buffers, held_natively
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
        held = held_natively(form, num_inputs)
        if num_outputs % _STEP:
            raise ValueError(f"{num_outputs} outputs on a device are no multiple of {_STEP}")
        self.library.add_codes("experts", form.codes)
        return held

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
        target, matrices = self._matrices(weights, x.dtype)
        call = jax.ffi.ffi_call(
            target,
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
            *matrices,
            jnp.zeros((0, weights.num_halves, size), x.dtype) if bias is None else bias,
            jnp.zeros((0, hidden_size), x.dtype) if down_bias is None else down_bias,
            slope=np.float32(config.gate_slope),
            cubic=np.float32(config.gate_cubic),
            offset=np.float32(config.up_offset),
            limit=np.float32(config.limit or 0),
        )
        return y

    def _matrices(
        self, weights: ExpertWeights, dtype: DTypeLike
    ) -> tuple[str, tuple[jax.Array, ...]]:
        """The function for these weights, and its arguments for them."""
        gate_up, down = weights.gate_up, weights.down
        if not isinstance(gate_up, CodedWeight) or not isinstance(down, CodedWeight):
            return self.library.target("jaxllm_experts", dtype), weights.arrays
        assert gate_up.form.codes == down.form.codes, (gate_up.form, down.form)
        target = self.library.target_for_codes("experts", down.form.codes, dtype)
        return target, (*buffers(gate_up), *buffers(down))

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
        config = dataclasses.replace(config, scales_input=False)
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
