"""Linear layers whose weights are codes with scales, in place of those of a model."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxllm_kernels.coded import CodedWeight, CodeForm
from jaxllm_kernels.dense.api import CodedMatmul

from jaxllm.errors import UnsupportedModelError, refused
from jaxllm.layers.linear import Linear
from jaxllm.layers.moe import Experts
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.quantization.form import Form, StoredCodes, StoredScales
from jaxllm.quantization.products import choose
from jaxllm.quantization.scheme import Scheme


class CodedLinear(nnx.Module):
    """y = x (codes * scales)^T + b over the last axis."""

    def __init__(
        self,
        linear: Linear,
        form: Form,
        name: str,
        *,
        ops: tuple[CodedMatmul, ...],
        num_shards: int,
    ):
        """Make the layer that computes an abstract linear one, by the first of the implementations
        that can."""
        weight, given = linear.weight, linear.weight.get_metadata()
        num_outputs, num_inputs = weight.shape
        group = form.group or num_inputs
        if num_inputs % group:
            raise UnsupportedModelError(
                f"{name} has {num_inputs} inputs; a scale for each {group} of them is supported "
                f"if they are a multiple of {group}"
            )
        outputs_axis, inputs_axis = given["axes"]
        is_cut = inputs_axis not in (None, "hidden") and num_shards > 1
        if is_cut and form.group is not None and num_inputs // num_shards % group:
            raise refused(
                "tensor_parallel_size",
                num_shards,
                f"the {num_inputs} inputs of {name} have a scale for each {group}, and these "
                "cannot be cut",
            )
        num_groups = num_inputs // group
        on_device = (num_outputs, num_inputs // num_shards if is_cut else num_inputs)
        asked = CodeForm(codes=form.codes, group=form.group)
        self.matmul, (self.form,) = choose(ops, asked, [on_device])
        self.weight = nnx.Param(
            jax.ShapeDtypeStruct(weight.shape, self.form.code_dtype),
            axes=given["axes"],
            parts=given["parts"],
            stored=StoredCodes(form),
        )
        self.weight_scale = nnx.Param(
            jax.ShapeDtypeStruct((num_outputs, num_groups), jnp.dtype(jnp.float32)),
            axes=(outputs_axis, inputs_axis if num_groups > 1 else None),
            parts=given["parts"],
            stored=StoredScales(form, num_inputs),
        )
        self.bias = linear.bias

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = CodedWeight(codes=self.weight[...], scales=self.weight_scale[...], form=self.form)
        y = self.matmul(x, weight)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


# Tensors beside codes and scales that nothing here needs: rows and the KV cache keep 16 bits.
_UNUSED = (r".*\.(input|output)_scale", r".*\.[qkv]_scale")


def with_codes(names: CheckpointMap, scheme: Scheme | None) -> CheckpointMap:
    """The map of a checkpoint that was written by a scheme."""
    return names if scheme is None else names.ignoring(*_UNUSED)


def store_codes(
    model: nnx.Module, scheme: Scheme, names: CheckpointMap, *, num_shards: int
) -> None:
    """Replace the linear layers of an abstract model that the scheme stores as codes."""
    for path, module in list(nnx.iter_graph(model)):
        name = ".".join(map(str, path))
        if isinstance(module, Experts):
            experts = names.modules(f"{name}.w13_weight", (module.w13_weight.shape,))
            if any(scheme.form_of([expert]) for expert in experts):
                raise UnsupportedModelError(
                    f"quantization {scheme.method!r} is not supported for a model with experts yet"
                )
        if not isinstance(module, Linear):
            continue
        parts = module.weight.get_metadata()["parts"]
        rows = [part.rows for part in parts] or [module.weight.shape[0]]
        pieces = tuple((count, module.weight.shape[1]) for count in rows)
        form = scheme.form_of(names.modules(f"{name}.weight", pieces))
        if form is not None:
            *parent, last = path
            ops = scheme.products.linear
            coded = CodedLinear(module, form, name, ops=ops, num_shards=num_shards)
            holder = functools.reduce(_step, parent, model)
            setattr(holder, str(last), coded)


def _step(module: Any, key: Any) -> Any:
    return module[key] if isinstance(key, int) else getattr(module, key)
