"""The simulated replica: planned by `jaxllm plan --json`, or timed by `jaxllm measure-steps`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jaxllm.cache_groups import CacheGroup, StateSnapshots
from jaxllm.errors import ValidationError, refused
from jaxllm.files import parse_json
from jaxllm.messages import EngineInfo
from jaxllm.plan.buckets import Bucket
from jaxllm.programs.roofline import Roofline
from jaxllm.simulation.mover import HostMemory
from jaxllm.simulation.step_time import Line, MeasuredTime, RooflineTime, StepTime

_T = TypeVar("_T")


class _Stage(msgspec.Struct):
    roofline: Roofline | None


class _Offload(msgspec.Struct):
    num_bytes: int
    num_blocks: tuple[int, ...]
    num_snapshots: int
    block_seconds: tuple[float, ...]


class _Plan(msgspec.Struct):
    """The fields of a plan's report that are needed."""

    model: str
    chip: str
    num_chips: int
    block_size: int
    cache_groups: tuple[CacheGroup, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    buckets: tuple[Bucket, ...]
    stages: list[_Stage]
    keeps_states: bool = False
    snapshots: StateSnapshots | None = None
    offload: _Offload | None = None


class MeasuredLine(msgspec.Struct):
    """The measured times of one program."""

    bucket: Bucket
    line: Line
    num_steps: int  # number of measured steps


class Measurement(msgspec.Struct):
    """The file that `jaxllm measure-steps` writes."""

    device: str
    num_chips: int
    info: EngineInfo
    host_s_per_step: float
    lines: list[MeasuredLine]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One replica."""

    name: str
    num_chips: int
    info: EngineInfo
    buckets: tuple[Bucket, ...]
    step_time: StepTime
    host_s_per_step: float
    host_memory: HostMemory | None = None  # None: evicted blocks are gone


def read_plan(
    path: Path,
    *,
    name: str | None,
    efficiency: float,
    launch_s: float,
    host_s_per_step: float,
    kv_offloading_size: float | None = None,
) -> Deployment:
    """Make a replica whose steps take their roofline's time divided by `efficiency`. What the plan
    keeps on the host has another size, if one is given in GiB."""
    plans = _read_json(path)
    if not isinstance(plans, Mapping) or not plans:
        raise ValidationError(f"{path} is no output of `jaxllm plan --json`")
    if name is None:
        if len(plans) > 1:
            raise ValidationError(f"{path} has plans for {', '.join(plans)}; choose one: --on NAME")
        (name,) = plans
    if name not in plans:
        raise refused("on", name, f"{path} has plans for {', '.join(plans)}")
    plan = _convert(path, plans[name], _Plan)
    stages = [stage.roofline for stage in plan.stages]
    if any(stage is None for stage in stages):
        raise ValidationError(
            f"{path}: the rates of {name} are not known, so there is no roofline; measure its "
            "steps with `jaxllm measure-steps`"
        )
    memory = _host_memory(path, plan, kv_offloading_size)
    info = EngineInfo(
        model=plan.model,
        model_dir="",
        vocab_size=1 << 31,
        max_model_len=plan.max_model_len,
        max_logprobs=0,
        eos_token_ids=[],
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        cache_groups=plan.cache_groups,
        block_size=plan.block_size,
        keeps_states=plan.keeps_states,
        snapshots=plan.snapshots,
        host_places=() if memory is None else memory.num_places,
    )
    return Deployment(
        name=f"{plan.model} on {name}",
        num_chips=plan.num_chips,
        info=info,
        buckets=plan.buckets,
        step_time=RooflineTime(
            stages=tuple(stage for stage in stages if stage is not None),
            efficiency=efficiency,
            launch_s=launch_s,
        ),
        host_s_per_step=host_s_per_step,
        host_memory=memory,
    )


def _host_memory(path: Path, plan: _Plan, size: float | None) -> HostMemory | None:
    """What the host keeps, of a size in GiB; None: that of the plan."""
    if size == 0 or (size is None and plan.offload is None):
        return None
    if (planned := plan.offload) is None:
        raise refused(
            "kv_offloading_size",
            size,
            f"{path} does not say what blocks cost: make it with "
            "`jaxllm plan --kv-offloading-size`, of any size",
        )
    counts = (*planned.num_blocks, *((planned.num_snapshots,) if plan.snapshots else ()))
    share = 1 if size is None else size * 2**30 / planned.num_bytes
    places = tuple(int(count * share) for count in counts)
    if not all(places):
        raise refused("kv_offloading_size", size, "it has no room for a block of each group")
    return HostMemory(num_places=places, seconds=planned.block_seconds)


def read_measurement(path: Path) -> Deployment:
    """Make a replica whose steps take their measured time."""
    found = _convert(path, _read_json(path), Measurement)
    return Deployment(
        name=f"{found.info.model} on {found.device}",
        num_chips=found.num_chips,
        info=found.info,
        buckets=tuple(entry.bucket for entry in found.lines),
        step_time=MeasuredTime(lines={entry.bucket: entry.line for entry in found.lines}),
        host_s_per_step=found.host_s_per_step,
    )


def _read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_text())
    except ValueError as error:
        raise ValidationError(f"{path} is no JSON: {error}") from error


def _convert(path: Path, value: Any, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValidationError(f"{path}: {error}; make it anew with this version") from error
