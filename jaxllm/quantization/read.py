"""Reads `quantization_config` of a config.json, and what the user asks for, into a scheme.

Every field is read, or named here with the reason why it changes nothing. Rows are not quantised:
they keep 16 bits where a checkpoint was made for products of 8 or 4 bits. So answers are those of
the stored weights, and closer to the model's before it was quantised.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxllm_kernels.coded import CodeForm

from jaxllm.errors import CheckpointError, UnsupportedModelError, refused, shown
from jaxllm.quantization.fields import (
    EVERY,
    FIELD,
    block,
    check_fields,
    check_one_of,
    inside,
    names_of,
)
from jaxllm.quantization.made import AtLoad
from jaxllm.quantization.read_compressed_tensors import read_compressed_tensors
from jaxllm.quantization.read_gguf import read_gguf
from jaxllm.quantization.read_other_formats import (
    read_awq,
    read_bitsandbytes,
    read_gptq,
    read_modelopt,
    read_mxfp4,
)
from jaxllm.quantization.scheme import Scheme
from jaxllm.quantization.storages import Bytes

# Linear layers that stay as they are if the user asks for codes, as vLLM has it.
_NEVER = (r".*\.shared_expert_gate$",)
# What is made of weights of 16 bits: a scale per output, or per group.
_AT_LOAD = {
    "int8": CodeForm(codes="int8"),
    "fp8": CodeForm(codes="float8_e4m3fn"),
    "int4": CodeForm(codes="int4", group=128, scale_dtype="bfloat16"),
}
# mxfp4 held in its groups, where products are done by output otherwise.
_IN_GROUPS = "mxfp4-groups"


def read_scheme(config: Mapping[str, Any] | None, asked: str | None) -> Scheme | None:
    """The scheme of a checkpoint, or the one that the user asks for. None: no layer has codes."""
    if not config:
        return None if asked is None else _at_load(asked)
    if not isinstance(config, Mapping):
        raise CheckpointError(f"config.json: {FIELD}={shown(config)} must be an object")
    method = config.get("quant_method", "of unknown kind")
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModelError(
            f"{FIELD} {method!s:.80} is not supported; supported are {', '.join(_METHODS)} and "
            "unquantised checkpoints"
        )
    keeps_groups = asked == _IN_GROUPS and method == "mxfp4"
    if asked is not None and asked != method and not keeps_groups:
        raise refused("quantization", asked, f"the checkpoint is quantised with {method}")
    scheme = _METHODS[method](config)
    return scheme.keeping_groups() if keeps_groups else scheme


def _at_load(asked: str) -> Scheme:
    if asked not in _AT_LOAD:
        names = list(_AT_LOAD)
        raise refused(
            "quantization",
            asked,
            f"a checkpoint that is not quantised can be read as {', '.join(names[:-1])} or "
            f"{names[-1]}; others name the method of a quantised one: {', '.join(_METHODS)}",
        )
    return Scheme(method=asked, storages=((EVERY, AtLoad(_AT_LOAD[asked])),), ignored=_NEVER)


# What changes nothing of what is computed here.
_FP8_HARMLESS = {
    "quant_method", "fmt", "scale_fmt", "activation_scheme", "ignored_layers", "dequantize",
}  # fmt: skip


def _read_fp8(config: Mapping[str, Any]) -> Scheme:
    """A scale for each tensor, or for each block of 128 by 128."""
    check_fields(
        config, {*_FP8_HARMLESS, "weight_block_size", "modules_to_not_convert", "kv_cache_scheme"}
    )
    check_one_of(config, "fmt", (None, "e4m3", "float8_e4m3fn"))
    check_one_of(config, "activation_scheme", (None, "dynamic", "static"))
    check_one_of(config, "scale_fmt", (None, "ue8m0", "float"))
    size = config.get("weight_block_size")
    codes = "float8_e4m3fn"
    if size is not None:
        outputs, inputs = block(size, "weight_block_size")
        form = CodeForm(codes=codes, group=inputs)
        storage = Bytes(form=form, outputs=outputs, scale_name="weight_scale_inv")
    else:
        # Writers that name the field use one name for all scales.
        name = "weight_scale_inv" if "weight_block_size" in config else "weight_scale"
        storage = Bytes(form=CodeForm(codes=codes), outputs=None, scale_name=name)
    names = [*names_of(config, "modules_to_not_convert"), *names_of(config, "ignored_layers")]
    ignored = (*map(inside, names), inside("lm_head"))
    return Scheme(method="fp8", storages=((EVERY, storage),), ignored=ignored)


_METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": _read_fp8,
    "mxfp4": read_mxfp4,
    "awq": read_awq,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "bitsandbytes": read_bitsandbytes,
    "gguf": read_gguf,
}
