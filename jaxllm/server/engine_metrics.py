"""The engine's current statistics for Prometheus: one series for each replica.

This module counts nothing, so every frontend gives the same answer.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from jaxllm.cache_groups import CacheGroup
from jaxllm.config import CacheConfig
from jaxllm.errors import EngineDeadError
from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.lora.request import AdapterLimits
from jaxllm.messages import EngineInfo
from jaxllm.metrics.figures import (
    EXPERT_TOKENS,
    EXPERT_TOKENS_HELP,
    FIGURES,
    STEP_TOKENS,
    STEP_TOKENS_HELP,
    step_tokens_buckets,
)
from jaxllm.metrics.memory import EngineMemory, resident_bytes
from jaxllm.metrics.stats import EngineStats

_LABELS = ("model_name", "engine")
_OF_GROUPS = (
    (GaugeMetricFamily, "kv_group_blocks", "group_blocks", "Blocks of a cache group."),
    (
        GaugeMetricFamily,
        "kv_group_blocks_used",
        "group_blocks_used",
        "Those of them that are in use.",
    ),
    (
        CounterMetricFamily,
        "kv_group_shortages",
        "group_shortages",
        "Times that an answer found too few of them free; see --kv-cache-request-len.",
    ),
)
_DEVICE_MEMORY = {
    "device_memory_used_bytes": ("used_bytes", "Memory of an accelerator that is in use."),
    "device_memory_peak_bytes": ("peak_bytes", "The most that has been in use."),
    "device_memory_limit_bytes": ("limit_bytes", "What there is to use."),
}


class EngineMetrics:
    """Asks the engine. After the engine has ended, it repeats the last statistics."""

    def __init__(self, engine: AsyncLLMEngine, prefix: str, model: str):
        self._engine = engine
        self._prefix = prefix
        self._model = model
        self._stats: list[EngineStats] = []
        self._memory: EngineMemory | None = None

    async def read(self) -> list[Metric]:
        """Read the current metrics."""
        try:
            self._stats = await self._engine.replica_stats()
            self._memory = await self._engine.memory()
        except EngineDeadError:
            self._memory = None
        families = Figures(self._prefix, self._model)
        return [
            *families.of_stats(self._stats),
            *families.of_groups(self._stats, self._engine.info.cache_groups),
            *families.of_memory(self._memory, resident_bytes()),
            *families.of_adapters(self._engine.info.adapters, self._stats),
            *families.of_experts(self._stats),
            families.of_cache(self._engine.config.cache, self._engine.info, len(self._stats)),
        ]


class Figures:
    """Converts plain data to Prometheus metrics, labelled with one model."""

    def __init__(self, prefix: str, model: str):
        self._prefix = prefix
        self._model = model

    def of_stats(self, replicas: Sequence[EngineStats]) -> Iterator[Metric]:
        """Metrics of the engine's statistics."""
        families: dict[str, Metric] = {}
        for figure in FIGURES:
            name = f"{self._prefix}:{figure.name}"
            kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
            labels = (*_LABELS, *figure.labels)
            family = families.setdefault(name, kind(name, figure.help, labels=labels))
            assert isinstance(family, kind)
            for number, stats in enumerate(replicas):
                values = (self._model, str(number), *figure.labels.values())
                family.add_metric(values, figure.read(stats))
        yield from families.values()
        steps = HistogramMetricFamily(
            f"{self._prefix}:{STEP_TOKENS}", STEP_TOKENS_HELP, labels=_LABELS
        )
        for number, stats in enumerate(replicas):
            buckets = list(step_tokens_buckets(stats).items())
            steps.add_metric((self._model, str(number)), buckets, stats.num_scheduled_tokens)
        yield steps

    def of_groups(
        self, replicas: Sequence[EngineStats], groups: Sequence[CacheGroup]
    ) -> Iterator[Metric]:
        """The blocks of each group of layers: those with a window keep what is within it."""
        for kind, name, attribute, text in _OF_GROUPS:
            family = kind(f"{self._prefix}:{name}", text, labels=(*_LABELS, "group", "window"))
            for number, stats in enumerate(replicas):
                counted = zip(groups, getattr(stats, attribute), strict=True)
                for index, (group, count) in enumerate(counted):
                    window = "none" if group.window is None else str(group.window)
                    labels = (self._model, str(number), str(index), window)
                    family.add_metric(labels, count)
            yield family

    def of_adapters(
        self, limits: AdapterLimits | None, replicas: Sequence[EngineStats]
    ) -> Iterator[Metric]:
        """The adapters of running and of waiting requests, in the labels.

        The value is the time of reading: readers that gather series take the latest one of an
        engine as current."""
        if limits is None:
            return
        now = time.time()
        family = GaugeMetricFamily(
            f"{self._prefix}:lora_requests_info",
            "Adapters in use, in the labels; the value is the time at which they were.",
            labels=(*_LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        for number, stats in enumerate(replicas):
            names = (",".join(stats.adapters_running), ",".join(stats.adapters_waiting))
            labels = (self._model, str(number), str(limits.max_loras), *names)
            family.add_metric(labels, now)
        yield family

    def of_experts(self, replicas: Sequence[EngineStats]) -> Iterator[Metric]:
        """The tokens of each expert of each layer, if they are counted."""
        if not any(stats.expert_tokens for stats in replicas):
            return
        labels = (*_LABELS, "layer", "expert")
        name = f"{self._prefix}:{EXPERT_TOKENS}"
        family = CounterMetricFamily(name, EXPERT_TOKENS_HELP, labels=labels)
        for number, stats in enumerate(replicas):
            for layer, counts in stats.expert_tokens.items():
                for expert, count in enumerate(counts):
                    family.add_metric((self._model, str(number), str(layer), str(expert)), count)
        yield family

    def of_memory(self, engine: EngineMemory | None, server_bytes: int) -> Iterator[Metric]:
        """Metrics of processes, and of devices whose backend reports its memory."""
        resident = GaugeMetricFamily(
            f"{self._prefix}:resident_memory_bytes",
            "What a process has in memory: the engine's, or the server's.",
            labels=("model_name", "process"),
        )
        resident.add_metric((self._model, "server"), server_bytes)
        if engine is not None:
            resident.add_metric((self._model, "engine"), engine.resident_bytes)
        yield resident
        for name, (field, text) in _DEVICE_MEMORY.items():
            family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=(*_LABELS, "device"))
            for number, devices in enumerate(engine.devices if engine else ()):
                for device in devices:
                    labels = (self._model, str(number), str(device.device))
                    family.add_metric(labels, getattr(device, field))
            yield family

    def of_cache(self, asked: CacheConfig, info: EngineInfo, num_replicas: int) -> Metric:
        """The requested cache configuration, with the block size and number of blocks in use."""
        values = {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)}
        values |= {"block_size": info.block_size, "num_gpu_blocks": info.cache_groups[0].num_blocks}
        values["enable_prefix_caching"] = asked.shares_prefixes(info)
        family = GaugeMetricFamily(
            f"{self._prefix}:cache_config_info",
            "The KV cache, in the labels.",
            labels=(*_LABELS, *values),
        )
        for number in range(num_replicas):
            family.add_metric((self._model, str(number), *map(str, values.values())), 1)
        return family
