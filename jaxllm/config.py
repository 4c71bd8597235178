"""What the user asks for: frozen dataclasses, each field declared once, with its help text.

Command-line flags are generated from these fields (`jaxllm.cli.arguments`), `LLM(...)` takes them
as flat keyword arguments, and nothing changes a config after it is made. `jaxllm.plan.make_plan`
decides from it what will run, as another type, `EnginePlan`.
"""

import dataclasses
import difflib
import math
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jaxllm import bundled, vllm_options
from jaxllm.cache_config import CacheConfig
from jaxllm.errors import ValidationError, refused
from jaxllm.handover_config import HandOverConfig
from jaxllm.logging import init_logger
from jaxllm.lora_config import LoRAConfig
from jaxllm.media_config import MediaConfig
from jaxllm.observability_config import LivenessConfig, ObservabilityConfig, ProfilerConfig
from jaxllm.option_types import check_type, option
from jaxllm.pooler_config import PoolerConfig, PoolingConfig
from jaxllm.speculative_config import Speculation, read_speculation
from jaxllm.structured_output.options import StructuredOutputsConfig

logger = init_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model and tokenizer"""

    model: str = option(
        bundled.MODEL,
        "Local directory or hub name of the model; 'bundled' is the small one of Python code that "
        "comes with jaxllm.",
    )
    tokenizer: str | None = option(None, "Directory or hub name of the tokenizer (default: model).")
    skip_tokenizer_init: bool = option(
        False, "Load no tokenizer: prompts are token ids and outputs have no text."
    )
    trust_remote_code: bool = option(False, "Allow tokenizer code that ships with the model.")
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    tokenizer_revision: str | None = option(None, "Branch, tag or commit of a hub tokenizer.")
    download_dir: str | None = option(None, "Where hub downloads are kept (default: hub cache).")
    load_format: Literal["auto", "safetensors", "dummy", "orbax"] = option(
        "auto",
        "How weights are read: 'orbax' as `jaxllm convert` has written them; 'dummy' makes random "
        "ones and reads only config.json.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Type of weights and activations; 'auto' follows the checkpoint."
    )
    batch_invariant: bool = option(
        False,
        "Give a request the same bits whatever runs beside it, however its prompt is cut and "
        "whatever is cached; only on CPUs, and some models and options are refused.",
    )
    quantization: str | None = option(
        None,
        "Keep weights that a checkpoint has in 16 bits as 'int8', 'fp8' or 'int4'; "
        "'mxfp4-groups' holds those of gpt-oss as they are stored.",
    )
    max_model_len: int | None = option(
        None, "Longest prompt plus output, in tokens (default: from the model's config)."
    )
    hf_overrides: Mapping[str, Any] | None = option(
        None, "JSON object of fields that replace those of the model's config.json."
    )
    generation_config: str = option(
        "auto",
        "Source of default sampling parameters: 'auto' (the model), 'vllm' (none) or a path.",
    )
    max_logprobs: int = option(
        20, "Most logprobs a request may ask for per position; -1 allows the whole vocabulary."
    )
    logits_processors: tuple[Any, ...] = option(
        (), "Classes (or importable 'module:Class') of logits processors traced into the sampler."
    )
    structured_outputs_config: Mapping[str, Any] | None = option(
        None,
        "JSON object: backend (auto or guidance), disable_any_whitespace, "
        "disable_additional_properties, reasoning_parser, enable_in_reasoning.",
    )
    seed: int = option(0, "Seed of requests that bring none.")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism"""

    tensor_parallel_size: int = option(1, "Devices over which every matrix of the model is cut.")
    enable_expert_parallel: bool = option(
        False,
        "Give each of these devices whole experts, in place of a part of every expert.",
    )
    pipeline_parallel_size: int = option(
        1, "Stages into which the layers are cut, each on devices of its own, with a step in each."
    )
    data_parallel_size: int = option(
        1, "Replicas of the model, each on devices of its own, that share the requests."
    )
    nnodes: int | Literal["auto"] = option(
        1,
        "Processes that run the engine together, one on each host, all started by the same command "
        "but for --node-rank; 'auto' asks the environment (a TPU pod, SLURM).",
    )
    node_rank: int = option(0, "Which of them this is; 0 has the prompts and the answers.")
    master_addr: str = option("127.0.0.1", "Address of the host of rank 0, for all of them.")
    master_port: int = option(29501, "Port on it where the ranks meet.")
    distributed_executor_backend: Literal["uni", "ray"] | None = option(
        None, "'ray' starts the ranks but this one on the other nodes of a Ray cluster."
    )

    @property
    def may_follow(self) -> bool:
        """Whether this process may be a follower of rank 0."""
        return self.nnodes != 1 and self.distributed_executor_backend != "ray"


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Scheduling"""

    max_num_seqs: int | None = option(None, "Most requests running at once.")
    max_num_batched_tokens: int | None = option(None, "Most tokens computed in one step.")
    enable_chunked_prefill: bool = option(True, "Split long prompts over several steps.")
    long_prefill_token_threshold: int = option(
        0, "Most prompt tokens of one request in one step; 0 means no such limit."
    )
    scheduling_policy: str = option(
        "fcfs", "Order of requests: 'fcfs', 'priority', or the name of a registered policy."
    )
    async_scheduling: bool = option(
        True, "Plan and dispatch a step before the tokens of the one before are on the host."
    )
    check_invariants: bool = option(
        False, "Check the scheduler's and the block pool's invariants after every step."
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding"""

    speculative_config: Mapping[str, Any] | None = option(
        None,
        "JSON object that turns it on: method (such as 'ngram'), num_speculative_tokens, "
        "num_speculative_tokens_per_batch_size, prompt_lookup_min and _max, model, max_model_len.",
    )
    spec_method: str | None = option(None, "The method alone.")
    spec_model: str | None = option(
        None, "Directory or hub name of a model or head that drafts, such as 'bundled-draft'."
    )
    spec_tokens: int | None = option(None, "num_speculative_tokens alone.")

    def read(self) -> Speculation | None:
        """What is asked for; None: nothing."""
        return read_speculation(
            self.speculative_config, self.spec_method, self.spec_tokens, self.spec_model
        )


DEFAULT_COMPILATION_CACHE_DIR = "~/.cache/jaxllm/xla"


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """Compilation"""

    enforce_eager: bool = option(False, "Compile each program when it is first needed, not before.")
    compile_behind: bool = option(
        False,
        "Start at once, compile what a step needs first, and all other programs meanwhile, as "
        "'jaxllm generate' does. On GPUs, whose compiler times products, all are compiled before.",
    )
    compilation_cache_dir: str | None = option(
        DEFAULT_COMPILATION_CACHE_DIR,
        "Where compiled programs are kept between starts; '' leaves it to JAX's setting.",
    )
    program_bundle: str | None = option(
        None,
        "Directory of programs compiled ahead by 'jaxllm plan --out'. Loading it runs the code in "
        "it: give only what you or somebody you trust has made.",
    )
    gpu_autotune_results: str | None = option(
        None,
        "File of XLA's results of timing matrix products on such a GPU, for programs that are "
        "compiled without one; xla_gpu_dump_autotune_results_to in XLA_FLAGS writes it there.",
    )
    gpu_graphs: Literal["whole", "flat", "off"] = option(
        "whole",
        "What of a step a GPU launches as one CUDA graph: 'whole', or, if its driver is slow or "
        "fails at that, 'flat' for all but conditionals and loops, or 'off'.",
    )
    native_kernels: bool = option(
        True,
        "On a CPU: attend, multiply the rows of decodes, and sample, by kernels in C++, which are "
        "compiled at the first start, if there is a compiler.",
    )
    attention_backend: str = option(
        "auto",
        "Attention implementation: 'auto' (by platform), the name of one of ours, or an importable "
        "'module:name' of yours, which runs the code of that module.",
    )

    @property
    def compiles_in_steps(self) -> bool:
        """Whether steps may wait for the compiler."""
        return self.enforce_eager or self.compile_behind

    def check(self, nnodes: int | str) -> None:
        if self.compile_behind and self.enforce_eager:
            raise refused(
                "compile_behind", True, "enforce_eager compiles nothing but what is needed"
            )
        if self.compile_behind and nnodes != 1:
            raise refused(
                "compile_behind", True, "several hosts compile before they start together"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options of an engine."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    parallel: ParallelConfig = ParallelConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    lora: LoRAConfig = LoRAConfig()
    pooling: PoolingConfig = PoolingConfig()
    media: MediaConfig = MediaConfig()
    hand_over: HandOverConfig = HandOverConfig()
    compilation: CompilationConfig = CompilationConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    profiler: ProfilerConfig = ProfilerConfig()
    liveness: LivenessConfig = LivenessConfig()

    @classmethod
    def create(cls, model: str | os.PathLike[str] | None = None, **options: Any) -> "EngineConfig":
        """Make a config from flat keyword arguments, as `LLM` takes them."""
        options = vllm_options.without_neutral(options)
        if model is None:
            logger.info("no model was named: this is the bundled one, small, of Python code")
        else:
            options["model"] = model
        for name in ("model", "tokenizer", "spec_model"):
            if isinstance(options.get(name), os.PathLike):
                options[name] = os.fspath(options[name])
        for name in ("logits_processors", "kv_cache_dtype_skip_layers", "allowed_media_domains"):
            if isinstance(options.get(name, ()), list | None):
                options[name] = tuple(options[name] or ())
        if isinstance(pooler := options.get("pooler_config"), PoolerConfig):
            options["pooler_config"] = msgspec.to_builtins(pooler)
        owners = _owners()
        groups: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            if name not in owners:
                raise ValidationError(_unknown(name, owners), parameter=name, value=value)
            groups.setdefault(owners[name], {})[name] = value
        parts = typing.get_type_hints(cls)
        config = cls(**{group: parts[group](**values) for group, values in groups.items()})
        config.validate()
        return config

    def validate(self) -> None:
        """Refuse values that are wrong for every model."""
        for group in dataclasses.fields(self):
            part = getattr(self, group.name)
            hints = typing.get_type_hints(type(part))
            for f in dataclasses.fields(part):
                check_type(f.name, getattr(part, f.name), hints[f.name])
        for name, low in _LOWEST.items():
            value = self.get(name)
            if isinstance(value, int) and value < low:
                raise ValidationError(
                    f"{name}={value} is too small; give at least {low}", parameter=name, value=value
                )
        share = self.cache.gpu_memory_utilization
        if not (math.isfinite(share) and 0 < share <= 1):
            raise ValidationError(
                f"gpu_memory_utilization={share} must be above 0 and at most 1",
                parameter="gpu_memory_utilization",
                value=share,
            )
        block_size = self.cache.block_size
        if block_size is not None and block_size & (block_size - 1):
            raise ValidationError(
                f"block_size={block_size} is not a power of two; try 16, 32, 64 or 128",
                parameter="block_size",
                value=block_size,
            )
        self._validate_hosts()
        self.compilation.check(self.parallel.nnodes)
        self.cache.check_offloading()
        size, replicas = self.cache.kv_offloading_size, self.parallel.data_parallel_size
        self.hand_over.check(
            size, replicas, self.parallel.nnodes, self.liveness.engine_iteration_timeout
        )
        self.lora.check()
        self.media.check()
        if self.model.structured_outputs_config:
            StructuredOutputsConfig.of(self.model.structured_outputs_config)
        self.pooling.read()
        stages = self.parallel.pipeline_parallel_size
        if (speculation := self.speculation.read()) is not None:
            speculation.check(self.parallel.tensor_parallel_size, stages)
        for name, low in (("engine_iteration_timeout", 1), ("engine_heartbeat_timeout", 3)):
            seconds = self.get(name)
            if seconds != 0 and not low <= seconds < math.inf:
                raise refused(name, seconds, f"give at least {low} seconds, or 0 for no limit")
        tokens, seqs = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            raise ValidationError(
                f"max_num_batched_tokens={tokens} is below max_num_seqs={seqs}; "
                "a step must have room for one token of every request",
                parameter="max_num_batched_tokens",
                value=tokens,
            )

    def _validate_hosts(self) -> None:
        nnodes, rank = self.parallel.nnodes, self.parallel.node_rank
        stages = self.parallel.pipeline_parallel_size
        if nnodes != 1 and stages > 1:
            raise refused(
                "pipeline_parallel_size",
                stages,
                "stages are on the devices of one host; over several, raise tensor_parallel_size",
            )
        if nnodes != "auto" and rank >= nnodes:
            raise refused("node_rank", rank, f"nnodes={nnodes}; ranks are 0 to {nnodes - 1}")
        if not 0 < self.parallel.master_port < 2**16:
            raise refused("master_port", self.parallel.master_port, "ports are 1 to 65535")

    def get(self, name: str) -> Any:
        """The value of a flat option name."""
        return getattr(getattr(self, _owners()[name]), name)


def EngineArgs(  # noqa: N802
    model: str | os.PathLike[str] | None = None, **options: Any
) -> EngineConfig:
    """Make a config from flat keyword arguments, under the name that vLLM's users know."""
    return EngineConfig.create(model, **options)


_LOWEST = {
    "max_model_len": 1,
    "max_logprobs": -1,
    "block_size": 1,
    "kv_cache_memory_bytes": 1,
    "kv_cache_request_len": 1,
    "mamba_block_size": 1,
    "num_state_snapshots": 0,
    "num_gpu_blocks_override": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
}


def _owners() -> dict[str, str]:
    """Flat option name -> the part of EngineConfig that declares it."""
    return {
        f.name: group
        for group, part in typing.get_type_hints(EngineConfig).items()
        for f in dataclasses.fields(part)
    }


def _unknown(name: str, known: Mapping[str, str]) -> str:
    if (reason := vllm_options.why_not(name)) is not None:
        return f"engine argument {name!r} is {reason}"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known arguments: {', '.join(sorted(known))}"
    return f"unknown engine argument {name!r}; {hint}"
