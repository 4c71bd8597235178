"""What a plan says of weights that draft, be they a second model or a head."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
from jaxllm_kernels.experts.api import ExpertsOp

from jaxllm.cache_groups import Window
from jaxllm.layers.context import MixerConfig
from jaxllm.parallel.sharding import device_bytes


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """The part that a second model and a head have in common."""

    model_dir: Path
    experts: ExpertsOp | None  # None: it has none
    attention_configs: tuple[MixerConfig, ...]  # of one device
    windows: tuple[Window, ...]  # by attention: of the cache group whose blocks it uses
    weights_bytes: int  # on one device
    cache_shapes: tuple[jax.ShapeDtypeStruct, ...] = ()  # by attention, over all devices
    block_bytes: tuple[int, ...] = ()  # of a block on one device, by attention

    @property
    def name(self) -> str:
        """What it is, for the summary."""
        raise NotImplementedError

    @property
    def kv_cache_bytes(self) -> int:
        """The bytes of the caches on one device."""
        return sum(map(device_bytes, self.cache_shapes))

    def cache_bytes(self, num_blocks: Mapping[Window, int]) -> int:
        """The bytes on one device if the cache groups had so many blocks."""
        sizes = zip(self.windows, self.block_bytes, strict=True)
        return sum(num_blocks[window] * size for window, size in sizes)

    def with_caches(
        self,
        cache_shape: Callable[[MixerConfig, int], jax.ShapeDtypeStruct],
        num_blocks: Mapping[Window, int],
    ) -> "DraftPlan":
        """The plan with caches in cache groups of so many blocks."""
        configs = self.attention_configs
        return dataclasses.replace(
            self,
            cache_shapes=tuple(
                cache_shape(config, num_blocks[window])
                for config, window in zip(configs, self.windows, strict=True)
            ),
            block_bytes=tuple(device_bytes(cache_shape(config, 1)) for config in configs),
        )
