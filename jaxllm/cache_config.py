"""What the user asks for of the KV cache: a part of `jaxllm.config`."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from jaxllm.cache_groups import StateSnapshots
from jaxllm.errors import refused
from jaxllm.option_types import option


class Keeping(Protocol):
    """What an engine keeps of requests beside blocks: states, and snapshots of them."""

    @property
    def keeps_states(self) -> bool: ...

    @property
    def snapshots(self) -> StateSnapshots | None: ...


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """KV cache"""

    block_size: int | None = option(None, "Tokens per KV block (default: chosen by the plan).")
    gpu_memory_utilization: float = option(
        0.92, "Share of an accelerator's memory that the engine may use."
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes for the KV cache; overrides gpu_memory_utilization."
    )
    num_gpu_blocks_override: int | None = option(None, "Number of KV blocks; overrides the rest.")
    kv_cache_request_len: int | None = option(
        None,
        "Length of the requests for which the cache is divided between layers with a sliding "
        "window and others (default: 8192, or max_model_len if that is less).",
    )
    enable_prefix_caching: bool | None = option(
        None,
        "Share KV blocks between requests with equal heads, and snapshots of the states of "
        "recurrent layers (default: on).",
    )
    mamba_block_size: int | None = option(
        None,
        "Tokens from one snapshot of recurrent layers' states to the next, of any kind; a multiple "
        "of the block size (default: about 512).",
    )
    num_state_snapshots: int | None = option(
        None,
        "Number of such snapshots; 0 turns prefix caching off for models with recurrent layers "
        "(default: as many as fit in a tenth of the free memory, at most two for each of "
        "max_num_seqs).",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "int8"] = option(
        "auto",
        "Type of cached keys and values; 'auto' has the model's own type, or what the checkpoint "
        "declares (kv_cache_scheme).",
    )
    calculate_kv_scales: bool = option(
        False,
        "Calculate the scales of a cache of 8 bits at the start, in a pass over made-up text, in "
        "place of those in the checkpoint. 'int8' does so wherever the checkpoint has none.",
    )
    kv_cache_dtype_skip_layers: tuple[str, ...] = option(
        (),
        "Layers whose cache keeps the model's type: their numbers, or 'sliding_window' for all "
        "with a window.",
    )

    kv_offloading_size: float | None = option(
        None,
        "GiB of each replica's host memory for KV blocks that the devices have no room for; they "
        "come back when a request needs them. Over several hosts each has its part.",
    )
    kv_offloading_path: str | None = option(
        None,
        "Private directory in which these blocks also outlive the process: they are users' text. "
        "Over several hosts each rank has the files of its part there.",
    )
    kv_offloading_path_size: float = option(
        16.0,
        "GiB that the files of each replica may take there, on each of its ranks; the least "
        "recently used ones give way.",
    )
    kv_offloading_backend: Literal["native"] = option(
        "native", "Who keeps the blocks on the host; vLLM's name for its own."
    )

    def check_offloading(self) -> None:
        """Refuse what is wrong for every model."""
        size = self.kv_offloading_size
        if size is None:
            if self.kv_offloading_path is not None:
                raise refused(
                    "kv_offloading_path",
                    self.kv_offloading_path,
                    "blocks go through the host's memory; give kv_offloading_size, too",
                )
            return
        for name in ("kv_offloading_size", "kv_offloading_path_size"):
            if not (math.isfinite(its := getattr(self, name)) and its > 0):
                raise refused(name, its, "give a number of GiB above 0")
        if self.enable_prefix_caching is False:
            raise refused(
                "kv_offloading_size",
                size,
                "blocks are found by the hashes of prefixes; leave enable_prefix_caching on",
            )

    def shares_prefixes(self, info: Keeping) -> bool:
        """Whether requests share blocks."""
        can_share = not info.keeps_states or info.snapshots is not None
        return self.enable_prefix_caching is not False and can_share
