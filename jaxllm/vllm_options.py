"""vLLM's options that we do not have, and what to use instead, since users bring vLLM's commands.

A name is that of a keyword argument, and of a flag with dashes. The options here are refused as not
supported, and never taken for a misspelt option of ours.
"""

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import refused

# The values at which an option has no effect. Statistics are always kept and never logged, whatever
# disable_log_stats says.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "cpu_offload_gb": (0,),
    "disable_log_stats": (True, False),
    "fully_sharded_loras": (False,),
    "enable_sleep_mode": (False, True),  # every engine can sleep
    "lora_dtype": ("auto", None),
    "logprobs_mode": ("raw_logprobs",),
    "mamba_cache_dtype": ("auto",),
    "mamba_cache_mode": ("align",),  # snapshots where rows end at the stride
    "mamba_ssm_cache_dtype": ("auto", "float32"),
    "tokenizer_mode": ("auto",),
}

# What to say of an option -> the options.
_ABSENT: dict[str, tuple[str, ...]] = {
    "adapters are cut as the layers that they change, and have the model's type": (
        "fully_sharded_loras", "lora_dtype",
    ),
    "images are made as the model's files and --mm-processor-kwargs say, and cut like text": (
        "disable_chunked_mm_input", "enable_mm_embeds", "media_io_kwargs", "mm_encoder_tp_mode",
        "mm_processor_cache_gb", "trust_request_mm_kwargs",
    ),
    "--structured-outputs-config has the options of forms of answers": (
        "guided_decoding_backend", "guided_decoding_disable_additional_properties",
        "guided_decoding_disable_any_whitespace", "guided_decoding_disable_fallback",
    ),
    "weights and KV cache are on the devices; --tensor-parallel-size takes more of them": (
        "cpu_offload_gb",
    ),
    "nobody is told of blocks and embeddings": ("ec_transfer_config", "kv_events_config"),
    "give its fields alone: --kv-role, --kv-ip, --kv-port": ("kv_transfer_config",),
    "a sequence is not cut over devices; --tensor-parallel-size cuts the model": (
        "decode_context_parallel_size", "prefill_context_parallel_size",
    ),
    "every replica is in this command; --data-parallel-size says how many": (
        "data_parallel_address", "data_parallel_backend", "data_parallel_hybrid_lb",
        "data_parallel_rank", "data_parallel_rpc_port", "data_parallel_size_local",
        "data_parallel_start_rank", "headless",
    ),
    "--max-num-seqs and --max-queued-requests are the limits": (
        "max_num_active_seqs", "max_num_queued_reqs",
    ),
    "--max-queued-tokens is the limit": ("max_num_queued_tokens",),
    "--sse-keep-alive-interval and every token as it comes are what streams have": (
        "stream_interval",
    ),
    "--scheduling-policy chooses among ours": (
        "prefill_schedule_interval", "scheduler_cls", "scheduler_reserve_full_isl", "watermark",
    ),
    "XLA compiles every step; --enforce-eager compiles when a program is first needed": (
        "compilation_config", "disable_cascade_attn", "performance_mode",
    ),
    "--attention-backend chooses among ours": ("model_impl", "worker_cls", "worker_extension_cls"),
    "--generation-config PATH names a file of defaults": ("override_generation_config",),
    "--hf-overrides replaces fields of config.json": ("hf_config_path",),
    "log in once with `hf auth login`": ("hf_token",),
    "the code of a tokenizer comes with its --tokenizer-revision": ("code_revision",),
    "the tokenizer is Hugging Face's": ("tokenizer_mode",),
    "logprobs are those of the model, before sampling changes them": ("logprobs_mode",),
    "prefixes are found by SHA-256": ("prefix_caching_hash_algo",),
    "blocks of all layers are of one kind": (
        "disable_hybrid_kv_cache_manager", "disable_sliding_window",
    ),
    "matrices of recurrent layers are float32, and --mamba-block-size is the stride of snapshots": (
        "mamba_cache_dtype", "mamba_cache_mode", "mamba_ssm_cache_dtype",
    ),
    "every engine can sleep; --admin-api-key-file opens /sleep": ("enable_sleep_mode",),
    "--profile-dir is where profiles go": ("profiler_config",),
    "--access-log logs every request": ("enable_log_requests", "max_log_len"),
    "--otlp-traces-endpoint gets a span for every request": ("collect_detailed_traces",),
    "/metrics has what there is": (
        "custom_histogram_buckets", "enable_mfu_metrics", "kv_cache_metrics",
        "kv_cache_metrics_sample",
    ),
    "--no-access-log leaves the lines of requests out": (
        "disable_uvicorn_access_log", "log_error_stack", "uvicorn_log_level",
    ),
    "/load always counts": ("enable_server_load_tracking",),
    "X-Request-Id is always in the answer": ("enable_request_id_headers",),
    "usage always tells cached tokens; requests ask for the rest in stream_options": (
        "enable_force_include_usage", "enable_prompt_tokens_details", "enable_per_request_metrics",
    ),
    "requests ask for it by a field of this name": ("return_tokens_as_token_ids",),
    "there is no page of documentation; /openapi.json describes the server": (
        "disable_fastapi_docs",
    ),
    "--max-header-bytes is the limit": ("h11_max_header_count", "h11_max_incomplete_event_size"),
    "the server listens at --host and --port, and speaks HTTP at /": ("grpc", "root_path", "uds"),
    "--ssl-certfile and --ssl-keyfile turn TLS on": ("ssl_cert_reqs", "ssl_ciphers"),
    "requests give chat_template_kwargs": ("default_chat_template_kwargs",),
    "the template gets the text of a message": ("chat_template_content_format",),
    "the answer is the assistant's": ("response_role",),
    "--tool-call-parser chooses among ours": ("tool_parser_plugin", "tool_server"),
    "the server runs no other code": ("middleware",),
    "flags are given on the command line": ("config",),
    "": ("additional_config", "disable_log_stats", "fingerprint_mode"),
}  # fmt: skip

INSTEAD = {name: instead for instead, names in _ABSENT.items() for name in names}

# vLLM's short flags.
SHORT_NAMES = {
    "cc": "compilation_config",
    "dcp": "decode_context_parallel_size",
    "dpa": "data_parallel_address",
    "dpb": "data_parallel_backend",
    "dpe": "data_parallel_hybrid_lb",
    "dph": "data_parallel_hybrid_lb",
    "dpl": "data_parallel_size_local",
    "dpp": "data_parallel_rpc_port",
    "dpr": "data_parallel_rank",
    "pcp": "prefill_context_parallel_size",
}


def why_not(name: str) -> str | None:
    """Why we lack one of vLLM's options; None if it is not one of these."""
    if name not in INSTEAD:
        return None
    return "not supported yet" + (f": {INSTEAD[name]}" if INSTEAD[name] else "")


def option_of_flag(flag: str) -> str:
    """The option that a flag sets: --no-enable-lora, --enable-lora=x, --foo.bar."""
    flag = flag.partition("=")[0].partition(".")[0]
    if not flag.startswith("--"):
        flag = "-cc" if flag.startswith("-O") else flag  # a level of it
        return SHORT_NAMES.get(flag.removeprefix("-"), "")
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


def without_neutral(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out vLLM's options at neutral values, and refuse their other values."""
    for name, neutral in NEUTRAL.items():
        if name in options and options[name] not in neutral:
            raise refused(
                name,
                options[name],
                f"{why_not(name)}; leave it out or give {' or '.join(map(repr, neutral))}",
            )
    return {name: value for name, value in options.items() if name not in NEUTRAL}
