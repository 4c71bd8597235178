"""Layers whose weights are codes, in place of those of a model."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxllm_kernels.coded import CodedWeight, CodeForm
from jaxllm_kernels.dense.tpu import TpuCodedMatmul
from jaxllm_kernels.dense.xla import XlaCodedMatmul
from jaxllm_kernels.experts.xla import XlaExperts

from jaxllm.errors import UnsupportedModelError, refused
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.linear import Linear
from jaxllm.layers.moe import Experts
from jaxllm.parallel.sharding import TENSOR, partition_spec
from jaxllm.quantization.form import HeldCodes, HeldOffsets, HeldScales, Storage
from jaxllm.quantization.made import AtLoad
from jaxllm.quantization.products import Products, choose

# Smaller groups than that are not worth their scales.
_SMALLEST_GROUP = 8


class CodedLinear(nnx.Module):
    """y = x W^T + b over the last axis, where W is codes."""

    def __init__(
        self, linear: Linear, storage: Storage, name: str, *, products: Products, num_shards: int
    ):
        """Make the layer that computes an abstract linear one, by the first implementation that
        has such products."""
        self.matmul, (self.form,), params = _of_weight(
            {"weight": linear.weight}, storage, name, products.linear, num_shards
        )
        for leaf, param in params.items():
            setattr(self, leaf, param)
        self.bias = linear.bias

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.matmul(x, _coded(self, "weight", self.form, lambda param: param[...]))
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class CodedHead(Embedding):
    """An output head whose weights are codes."""

    def __init__(
        self, head: Embedding, storage: Storage, name: str, *, products: Products, num_shards: int
    ):
        self.vocab_size = head.vocab_size
        self.by_codes, (self.form,), params = _of_weight(
            {"weight": head.weight}, storage, name, products.linear, num_shards
        )
        for leaf, param in params.items():
            setattr(self, leaf, param)
        self.bias = head.bias

    def product(self, hidden: jax.Array) -> jax.Array:
        return self.by_codes(hidden, _coded(self, "weight", self.form, lambda param: param[...]))


class CodedExperts(Experts):
    """Experts whose matrices are codes."""

    def __init__(
        self, experts: Experts, storage: Storage, name: str, *, products: Products, num_shards: int
    ):
        self.spec = experts.spec
        matrices = {"w13_weight": experts.w13_weight, "w2_weight": experts.w2_weight}
        self.op, self.forms, params = _of_weight(
            matrices, storage, name, products.experts, num_shards
        )
        for leaf, param in params.items():
            setattr(self, leaf, param)
        self.w13_bias, self.w2_bias = experts.w13_bias, experts.w2_bias

    def matrices(self, of: Any) -> tuple[Any, Any]:
        gate_up, down = self.forms
        return _coded(self, "w13_weight", gate_up, of), _coded(self, "w2_weight", down, of)


def put_on_mesh(module: CodedLinear | CodedHead, mesh: Mesh) -> None:
    """Tell a product that every device computes for itself how its weight is cut over a mesh."""
    leaf = "matmul" if isinstance(module, CodedLinear) else "by_codes"
    product = getattr(module, leaf)
    if isinstance(product, TpuCodedMatmul):
        outputs, inputs = partition_spec(vars(module)["weight"].get_metadata()["axes"])
        setattr(module, leaf, replace(product, mesh=mesh, cut=(outputs, inputs)))


def has_plain_experts(model: Any) -> bool:
    """Whether experts of a model have weights that are no codes."""
    return any(
        isinstance(module, Experts) and not isinstance(module, CodedExperts)
        for _, module in nnx.iter_graph(model)
    )


def describe_products(model: Any) -> tuple[str, ...]:
    """How products with the codes of a model are computed, for each form that it has."""
    found: dict[str, None] = {}
    for _, module in nnx.iter_graph(model):
        if isinstance(module, CodedExperts):
            op, what = module.op, " of experts"
            by_xla = op.coded if isinstance(op, XlaExperts) else None
            stored, held = module.w13_weight.get_metadata()["stored"], module.forms[0]
        elif isinstance(module, (CodedLinear, CodedHead)):
            op: Any = module.matmul if isinstance(module, CodedLinear) else module.by_codes
            what, by_xla = "", op if isinstance(op, XlaCodedMatmul) else None
            about = vars(module)["weight"].get_metadata()
            stored, held = about["stored"], module.form
        else:
            continue
        form = stored.storage.form
        held_as = "" if form.codes == held.codes else f", held exactly as {held}"
        pieces = by_xla is not None and by_xla.widens_pieces(held)
        how = (
            f"{op.name!r}, which widens a piece of a matrix at a time" if pieces else repr(op.name)
        )
        found[f"{form}{held_as}{what}: {how}"] = None
    return tuple(found)


def _coded(module: Any, leaf: str, form: CodeForm, of: Any) -> Any:
    """The weight with a value of each of its parameters for leaves."""
    return CodedWeight(
        codes=of(getattr(module, leaf)),
        scales=of(getattr(module, f"{leaf}_scale")),
        offsets=of(getattr(module, f"{leaf}_offset")) if form.has_offsets else None,
        form=form,
    )


def _of_weight(
    weights: dict[str, nnx.Param],
    storage: Storage,
    name: str,
    ops: tuple[Any, ...],
    num_shards: int,
) -> tuple[Any, tuple[CodeForm, ...], dict[str, nnx.Param]]:
    """The implementation for weights, the forms in which it takes them, and their parameters by
    their leaves."""
    # Groups of codes that are made fit each weight.
    storages = [
        storage.fitted(weight.shape[-1]) if isinstance(storage, AtLoad) else storage
        for weight in weights.values()
    ]
    asked = [
        _cut(weight, its, f"{name}.{leaf}", num_shards)
        for (leaf, weight), its in zip(weights.items(), storages, strict=True)
    ]
    shapes = [shape for _, shape in asked]
    # Weights of one layer have one implementation.
    op, forms = choose(ops, [form for form, _ in asked], shapes, name)
    params = {}
    for (leaf, weight), its, held in zip(weights.items(), storages, forms, strict=True):
        params |= _params(leaf, weight, its, held)
    return op, forms, params


def _cut(
    weight: nnx.Param, storage: Storage, name: str, num_shards: int
) -> tuple[CodeForm, tuple[int, int]]:
    """The storage's form with groups that devices do not share, and the weight's sizes on one."""
    axes, form = weight.get_metadata()["axes"], storage.form
    *_, num_outputs, num_inputs = weight.shape
    num_cut = num_shards if _is_cut(axes[-1]) else 1
    on_device = num_inputs // num_cut
    if form.group is not None:
        # Scales of a block that several devices have, or of an incomplete one, are repeated.
        group = math.gcd(form.group, on_device)
        if group < min(_SMALLEST_GROUP, form.group) or form.bits == 4 and group % 2:
            what = f"the {num_inputs} inputs of {name} have a scale for each {form.group}"
            if num_cut > 1:
                raise refused(
                    "tensor_parallel_size", num_shards, f"{what}, and these cannot be cut"
                )
            raise UnsupportedModelError(f"{what}, which does not divide them")
        form = replace(form, group=group)
    if form.bits == 4 and on_device % 2:
        raise UnsupportedModelError(f"{name}: {on_device} inputs on a device are an odd number")
    return form, (num_outputs // (num_shards if _is_cut(axes[-2]) else 1), on_device)


def _is_cut(axis: str | None) -> bool:
    return TENSOR in partition_spec((axis,))


def _params(leaf: str, weight: nnx.Param, storage: Storage, held: CodeForm) -> dict[str, nnx.Param]:
    """The parameters of a weight: codes, scales, and perhaps offsets."""
    given = weight.get_metadata()
    *others, num_inputs = weight.shape
    num_groups = held.num_groups(num_inputs)
    *axes, last = given["axes"]
    about: dict[str, Any] = {
        "storage": storage,
        "held": held,
        "num_inputs": num_inputs,
        "floats": leaf if isinstance(storage, AtLoad) else None,
    }
    rest = {key: given[key] for key in ("parts", "rows") if key in given}

    def param(size: int, dtype: Any, last: str | None, stored: Any) -> nnx.Param:
        shape = jax.ShapeDtypeStruct((*others, size), jnp.dtype(dtype))
        return nnx.Param(shape, axes=(*axes, last), stored=stored, **rest)

    of_groups = last if num_groups > 1 else None
    params = {
        leaf: param(num_inputs * held.bits // 8, held.code_dtype, last, HeldCodes(**about)),
        f"{leaf}_scale": param(num_groups, held.scale_dtype, of_groups, HeldScales(**about)),
    }
    if held.has_offsets:
        stored = HeldOffsets(**about)
        params[f"{leaf}_offset"] = param(num_groups, held.offset_dtype, of_groups, stored)
    return params
