"""Reads the `quantization_config` of AWQ, GPTQ, gpt-oss, ModelOpt and bitsandbytes."""

from collections.abc import Mapping
from typing import Any

from jaxllm_kernels.coded import CodeForm

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.quantization.fields import (
    EVERY,
    FIELD,
    check_fields,
    check_one_of,
    glob,
    inside,
    names_of,
)
from jaxllm.quantization.scheme import Scheme
from jaxllm.quantization.storages import Awq, Bytes, GptOss, Gptq, PackedFloat4

_HEAD = "lm_head"


def read_mxfp4(config: Mapping[str, Any]) -> Scheme:
    """gpt-oss: experts have codes, and nothing else."""
    check_fields(config, {"quant_method", "modules_to_not_convert", "dequantize"})
    ignored = tuple(map(glob, names_of(config, "modules_to_not_convert")))
    storages = ((r".*\.experts\.", GptOss()),)
    return Scheme(method="mxfp4", storages=storages, ignored=ignored)


# How codes were searched for, by which product others multiply, and how the file was made.
_AWQ_HARMLESS = {
    "quant_method", "do_fuse", "exllama_config", "fuse_max_seq_len", "backend", "desc_act",
    "modules_to_fuse",
}  # fmt: skip


def read_awq(config: Mapping[str, Any]) -> Scheme:
    read = {"bits", "group_size", "zero_point", "version", "modules_to_not_convert"}
    check_fields(config, {*_AWQ_HARMLESS, *read})
    check_one_of(config, "bits", (4,))
    check_one_of(config, "zero_point", (None, True))
    check_one_of(config, "version", (None, "gemm", "GEMM"))
    form = CodeForm(codes="int4", group=_group(config), has_offsets=True)
    ignored = (*map(inside, names_of(config, "modules_to_not_convert")), inside(_HEAD))
    return Scheme(method="awq", storages=((EVERY, Awq(form=form)),), ignored=ignored)


_GPTQ_HARMLESS = {
    "quant_method", "desc_act", "damp_percent", "damp_auto_increment", "true_sequential",
    "static_groups", "model_name_or_path", "model_file_base_name", "quantizer", "meta", "dataset",
    "tokenizer", "batch_size", "pad_token_id", "cache_block_outputs", "model_seqlen",
    "module_name_preceding_first_block", "max_input_length", "use_cuda_fp16", "use_exllama",
    "exllama_config", "disable_exllama", "mse", "hyb_act", "backend", "act_group_aware",
    "block_name_to_quantize", "modules_in_block_to_quantize",
}  # fmt: skip


def read_gptq(config: Mapping[str, Any]) -> Scheme:
    read = {
        "bits", "group_size", "sym", "checkpoint_format", "format", "lm_head", "dynamic",
        "modules_to_not_convert", "pack_dtype", "is_marlin_format",
    }  # fmt: skip
    check_fields(config, {*_GPTQ_HARMLESS, *read})
    check_one_of(config, "bits", (4, 8))
    check_one_of(config, "sym", (True, False))
    check_one_of(config, "checkpoint_format", (None, "gptq", "gptq_v2"))
    check_one_of(config, "pack_dtype", (None, "int32"))
    check_one_of(config, "is_marlin_format", (None, False))
    check_one_of(config, "lm_head", (None, True, False))
    if config.get("dynamic"):
        raise UnsupportedModelError(
            f"{FIELD}.dynamic={shown(config['dynamic'])} is not supported: it stores some "
            "layers in another form"
        )
    form = CodeForm(
        codes=f"int{config['bits']}", group=_group(config), has_offsets=not config["sym"]
    )
    is_second = "gptq_v2" in (config.get("checkpoint_format"), config.get("format"))
    storage = Gptq(form=form, less_one=not is_second)
    ignored = list(map(inside, names_of(config, "modules_to_not_convert")))
    if not config.get("lm_head"):
        ignored.append(inside(_HEAD))
    return Scheme(method="gptq", storages=((EVERY, storage),), ignored=tuple(ignored))


_MODELOPT_HARMLESS = {"quant_method", "producer", "kv_cache_quant_algo", "kv_cache_scheme"}


def read_modelopt(config: Mapping[str, Any]) -> Scheme:
    """fp8 with a scale for each tensor, or nvfp4 whose second scale multiplies."""
    check_fields(
        config,
        {*_MODELOPT_HARMLESS, "quant_algo", "group_size", "exclude_modules", "ignore",
         "config_groups"},
    )  # fmt: skip
    check_one_of(config, "quant_algo", ("FP8", "NVFP4"))
    if config["quant_algo"] == "FP8":
        storage: Any = Bytes(form=CodeForm(codes="float8_e4m3fn"), outputs=None)
    else:
        check_one_of(config, "group_size", (None, 16))
        storage = PackedFloat4(
            form=CodeForm(codes="float4_e2m1fn", group=16),
            codes_name="weight",
            scalar_name="weight_scale_2",
            divides=False,
        )
    names = [*names_of(config, "exclude_modules"), *names_of(config, "ignore"), _HEAD]
    ignored = tuple(map(glob, names))
    return Scheme(method="modelopt", storages=((EVERY, storage),), ignored=ignored)


_BNB_HARMLESS = {
    "quant_method", "_load_in_4bit", "_load_in_8bit", "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight", "llm_int8_threshold", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
}  # fmt: skip


def read_bitsandbytes(config: Mapping[str, Any]) -> Scheme:
    """int8 with the largest weight of each output."""
    check_fields(config, {*_BNB_HARMLESS, "load_in_4bit", "load_in_8bit", "llm_int8_skip_modules"})
    if config.get("load_in_4bit"):
        raise UnsupportedModelError(
            f"{FIELD}.load_in_4bit=True is not supported: of bitsandbytes only load_in_8bit is; "
            "give the checkpoint in 16 bits with quantization='int4'"
        )
    check_one_of(config, "load_in_8bit", (True,))
    storage = Bytes(
        form=CodeForm(codes="int8"), outputs=1, scale_name="SCB", is_row=True, factor=1 / 127
    )
    ignored = (*map(inside, names_of(config, "llm_int8_skip_modules")), inside(_HEAD))
    return Scheme(method="bitsandbytes", storages=((EVERY, storage),), ignored=ignored)


def _group(config: Mapping[str, Any]) -> int | None:
    """Inputs that share a scale; None: all."""
    size = config.get("group_size")
    if size == -1 and type(size) is int:
        return None
    if type(size) is not int or not 1 <= size <= 1 << 20:
        raise CheckpointError(f"config.json: {FIELD}.group_size={shown(size)} is no size")
    return size
