"""Which ranks run each replica of an engine on several hosts, and by which plan."""

import dataclasses
import hashlib

import jax

from jaxllm.config import EngineConfig
from jaxllm.errors import JaxLLMError, ValidationError, refused
from jaxllm.executor.wire import Fits, Hello
from jaxllm.files import MAX_JSON_BYTES, read_bytes
from jaxllm.messages import EngineInfo
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.stages import replica_devices
from jaxllm.programs.sizing import plan_engine
from jaxllm.weights.checkpoint import resolve_model_dir

# The options that may differ from rank to rank.
_OWN_OPTIONS = {"node_rank", "download_dir", "compilation_cache_dir"}
# Of what a rank reports of its plan, likewise.
_OF_DIRECTORIES = {"model_dir"}


class Layout:
    """The ranks and plans of the replicas. Every rank computes the same, since JAX numbers the
    devices of all processes alike."""

    def __init__(self, config: EngineConfig):
        parallel = config.parallel
        size, replicas = parallel.tensor_parallel_size, parallel.data_parallel_size
        self._config = config
        self._devices = [
            replica_devices(config.parallel, replica)[:size] for replica in range(replicas)
        ]
        self.ranks = [sorted({d.process_index for d in devices}) for devices in self._devices]
        idle = set(range(jax.process_count())).difference(*self.ranks)
        if idle:
            raise refused(
                "nnodes",
                jax.process_count(),
                f"ranks {sorted(idle)} would have nothing to do: tensor_parallel_size={size} x "
                f"data_parallel_size={replicas} are {size * replicas} of the "
                f"{len(jax.devices())} devices; raise one of them, or take fewer ranks",
            )

    def replicas_of(self, rank: int) -> list[int]:
        """The replicas that have a device on this rank."""
        return [replica for replica, ranks in enumerate(self.ranks) if rank in ranks]

    def what_fits(self, rank: int) -> dict[int, Fits]:
        """How much of each replica fits in this rank's memory."""
        found = {}
        for replica in self.replicas_of(rank):
            plan = plan_engine(self._config, self._devices[replica])
            count = 0 if plan.snapshots is None else plan.snapshots.count
            found[replica] = Fits(plan.num_blocks, count if plan.states_bytes else None)
        return found

    def plan(self, replica: int, fits: Fits) -> EnginePlan:
        """The plan of a replica with as much as fits on all its ranks."""
        sizes = {"num_gpu_blocks_override": fits.num_blocks}
        if fits.num_snapshots is not None:
            sizes["num_state_snapshots"] = fits.num_snapshots
        cache = dataclasses.replace(self._config.cache, **sizes)
        config = dataclasses.replace(self._config, cache=cache)
        return plan_engine(config, self._devices[replica])


def options_of(config: EngineConfig) -> dict[str, str]:
    """The options that must be the same on all ranks, by name."""
    options = {
        f.name: repr(getattr(part, f.name))
        for part in (getattr(config, group.name) for group in dataclasses.fields(config))
        for f in dataclasses.fields(part)
        if f.name not in _OWN_OPTIONS
    }
    model = config.model
    model_dir = resolve_model_dir(model.model, model.revision, model.download_dir)
    options["config.json"] = hashlib.sha256(
        read_bytes(model_dir / "config.json", most=MAX_JSON_BYTES)
    ).hexdigest()
    options["jax"] = jax.__version__
    return options


def check_same(options: dict[str, str], hello: Hello) -> None:
    """Refuse a rank that was started with other options than rank 0."""
    names = sorted(
        name
        for name in options.keys() | hello.options.keys()
        if options.get(name) != hello.options.get(name)
    )
    if names:
        name = names[0]
        raise ValidationError(
            f"rank {hello.rank} was started with another {name} than rank 0: "
            f"{hello.options.get(name)}, not {options.get(name)}; give every rank the same command",
            parameter=name,
        )


def check_alike(replica: int, infos: dict[int, EngineInfo]) -> None:
    """Refuse ranks that have not planned the same, by what each has reported: rank 0 numbers the
    blocks, snapshots and places of all."""
    (first, expected), *others = infos.items()
    for rank, info in others:
        for field in info.__struct_fields__:
            here, there = getattr(expected, field), getattr(info, field)
            if field not in _OF_DIRECTORIES and here != there:
                raise JaxLLMError(
                    f"rank {rank} has planned replica {replica} with {field} {there}, and rank "
                    f"{first} with {here}; give every rank the same files and the same hardware"
                )
