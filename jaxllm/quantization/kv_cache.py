"""Keys and values that are cached as codes of 8 bits: what a checkpoint says of them, and where it
has their scales.

A key or value is its code times the scale of its kv head, and so is one in the checkpoint.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.models.checkpoint_map import Box, Rows, Shape, Source, Tensor, Tensors, ViewedAs
from jaxllm.quantization.sources import Spread

KVCodes = Literal["int8", "float8_e4m3fn"]

# The largest code of each type.
LARGEST_CODE: dict[KVCodes, float] = {"int8": 127.0, "float8_e4m3fn": 448.0}


class ScaleNames(NamedTuple):
    """The scales of an attention in a checkpoint, after the attention's own name."""

    keys: str
    values: str


# As ModelOpt writes them; others of a fused projection; compressed-tensors; one for both, as it was
# once. Names that end like others come first.
_NAMES = (
    ScaleNames("k_proj.k_scale", "v_proj.v_scale"),
    ScaleNames("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ScaleNames("k_scale", "v_scale"),
    ScaleNames("kv_scale", "kv_scale"),
)
# Scales of caches, queries and scores in checkpoints. A cache of the model's type needs none.
UNUSED_SCALES = r".*\.(k|v|kv|q|prob)_scale"


@dataclass(frozen=True)
class StoredScales:
    """Scales that a checkpoint has: one for all heads of a layer, or one for each."""

    names: ScaleNames
    # The number of axes that follow that of the heads; None: one scale for all heads.
    axes_after_heads: int | None = None

    # Made-up weights have no names.
    largest = 1.0

    def __call__(self, module: str, shape: Shape) -> Source:
        """The scales [K, 2] of an attention."""
        num_heads, _ = shape
        return _KeysAndValues(
            *(self._of_heads(f"{module}.{name}", num_heads) for name in self.names)
        )

    def _of_heads(self, name: str, num_heads: int) -> Source:
        if self.axes_after_heads is None:
            return Spread(ViewedAs(Tensor(name, (1,)), (1, 1)), num_heads, num_heads)
        ones = (1,) * self.axes_after_heads
        return ViewedAs(Tensor(name, (num_heads, *ones)), (num_heads, 1))


@dataclass(frozen=True, kw_only=True)
class CachedCodes:
    """How a layer caches its keys and values."""

    codes: KVCodes
    stored: StoredScales | None = None  # None: scales are 1.0, or calculated at the start


class Declared(NamedTuple):
    """What a checkpoint declares about caches."""

    codes: KVCodes
    field: str  # of config.json


def read_declared(config: Mapping[str, Any] | None) -> Declared | None:
    """What the quantization_config of a config.json declares about caches."""
    if not isinstance(config, Mapping):
        return None
    inner = config.get("quantization")
    for where in (config, inner if isinstance(inner, Mapping) else {}):
        if where.get("kv_cache_quant_algo"):
            return _of_name(where["kv_cache_quant_algo"], "kv_cache_quant_algo")
        if where.get("kv_cache_scheme"):
            return _of_scheme(where["kv_cache_scheme"])
    return None


def _of_name(algorithm: object, field: str) -> Declared:
    name = algorithm.lower() if isinstance(algorithm, str) else None
    if name in ("fp8", "static", "float"):
        return Declared("float8_e4m3fn", field)
    if name == "int8":
        return Declared("int8", field)
    raise _not_supported(field, algorithm)


def _of_scheme(scheme: object) -> Declared:
    field = "kv_cache_scheme"
    if not isinstance(scheme, Mapping):
        return _of_name(scheme, field)
    named = {"num_bits": (8,), "symmetric": (None, True), "dynamic": (None, False)}
    for name, supported in named.items():
        if scheme.get(name) not in supported:
            raise _not_supported(f"{field}.{name}", scheme.get(name))
    if scheme.get("strategy") not in (None, "tensor", "attn_head"):
        raise _not_supported(f"{field}.strategy", scheme["strategy"])
    codes: dict[Any, KVCodes] = {"float": "float8_e4m3fn", "int": "int8"}
    if scheme.get("type") not in codes:
        raise _not_supported(f"{field}.type", scheme.get("type"))
    return Declared(codes[scheme["type"]], field)


def _not_supported(field: str, value: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantization_config.{field}={shown(value)} is not supported for cached keys and values; "
        "give kv_cache_dtype='bfloat16' or 'float16' to keep them in the model's own type"
    )


def find_scales(shapes: Mapping[str, Shape]) -> StoredScales | None:
    """The scales among tensors of these shapes; None: there are none."""
    for names in _NAMES:
        found = next((name for name in shapes if _is_of(name, names.keys)), None)
        if found is not None:
            shape = shapes[found]
            return StoredScales(names, None if shape == (1,) else len(shape) - 1)
    return None


def _is_of(tensor: str, name: str) -> bool:
    return tensor.endswith(f".{name}")


@dataclass(frozen=True)
class _KeysAndValues:
    """Scales [K, 2] of keys [K, 1] and values [K, 1]."""

    keys: Source
    values: Source

    @property
    def shape(self) -> Shape:
        return (self.keys.shape[0], 2)

    def rows(self) -> Iterator[Rows]:
        """Both may be the same tensor."""
        return iter(dict.fromkeys((*self.keys.rows(), *self.values.rows())))

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        heads, columns = box
        held = np.empty((len(target), 2), target.dtype)
        for column, source in enumerate((self.keys, self.values)):
            source.copy(tensors, (heads, slice(0, 1)), held[:, column : column + 1])
        if not (np.isfinite(held) & (held > 0)).all():
            names = _names(self.rows())
            raise CheckpointError(f"tensor {' or '.join(names)} has a scale that is not above zero")
        target[...] = held[:, columns]


def _names(rows: Iterator[Rows]) -> Collection[str]:
    return list(dict.fromkeys(its.tensor.name for its in rows))
