"""The identity of an engine's programs: everything that determines them, as comparable text.

Precompiled programs are used only if all of this is equal. Sources count by their contents, so no
version number needs to be raised.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import jax
import jaxllm_kernels
from jax.sharding import Mesh
from jaxllm_kernels.platform import Device, processor

import jaxllm
from jaxllm.plan.draft_plan import DraftPlan
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.stages import StagePlan
from jaxllm.speculative_config import Speculation

# The fields of a plan that do not affect programs, or follow from others, as `between` does. Every
# other field does, also a new one.
_NOT_IN_PROGRAMS = {
    "model_name", "model_dir", "load_format", "seed", "eos_token_ids", "default_sampling_params",
    "max_new_tokens", "compiles", "program_bundle", "offload",
    "between",
}  # fmt: skip
# XLA flags that change no program. JAX sets the last one on a TPU VM; the chip's compiler options
# contain it everywhere.
_FLAGS_BESIDE_PROGRAMS = (
    "--xla_force_host_platform_device_count", "--xla_dump",
    "--xla_gpu_dump_autotune_results_to", "--xla_tpu_use_enhanced_launch_barrier",
)  # fmt: skip
# JAX settings, from the environment or the user, that change how programs are traced.
_JAX_SETTINGS = (
    "jax_default_matmul_precision", "jax_enable_x64", "jax_debug_nans", "jax_debug_infs",
    "jax_use_shardy_partitioner",
)  # fmt: skip
# Folders of jaxllm that are never traced: changes there do not affect programs.
_BESIDE_PROGRAMS = {
    "__pycache__", "batch", "bench", "bundled", "cli", "engine", "executor", "frontend", "metrics",
    "openai", "server", "simulation", "structured_output", "training",
}  # fmt: skip
_LONGEST = 100  # longer values are hashed


def program_identity(plan: EnginePlan) -> dict[str, str]:
    """Names and values; long values are hashed. Equal identities have equal programs."""
    facts = {
        "jaxllm": jaxllm.__version__,
        "sources": _sources(),
        **_compiler(plan),
        # Before the groups, which are divided by it: it is the number that people know.
        "num_blocks": str(plan.num_blocks),
        **{
            field.name: _text(getattr(plan, field.name))
            for field in dataclasses.fields(plan)
            if field.name not in _NOT_IN_PROGRAMS
        },
    }
    return {name: text if len(text) <= _LONGEST else _hash(text) for name, text in facts.items()}


def identity_hash(plan: EnginePlan) -> str:
    """The identity as a short hash."""
    return _short_hash(repr(sorted(program_identity(plan).items())))


def module_hash(plan: EnginePlan, mesh: Mesh, module: str) -> str:
    """What determines one program of the plan once it is lowered to a module, as a short hash: the
    module, the compiler and the devices, and no longer how it was made."""
    ids = [device.id for device in mesh.devices.flat]
    return _short_hash(f"{sorted(_compiler(plan).items())}\n{ids}\n{module}")


def _compiler(plan: EnginePlan) -> dict[str, str]:
    """What compiles the plan's programs, and for which devices."""
    devices = [device for stage in plan.stages for device in stage.mesh.devices.flat]
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "compiler": devices[0].client.platform_version,
        "JAX settings": repr([getattr(jax.config, name) for name in _JAX_SETTINGS]),
        "XLA optimises little": str(jax.config.read("jax_disable_most_optimizations")),
        "XLA flags": _flags(),
        "host": processor() if plan.chip.platform == "cpu" else "any",
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "topology": ", ".join(map(_place, devices)),
    }


def foreign_code(plan: EnginePlan) -> str | None:
    """Code in the plan's programs from outside of jaxllm, whose changes cannot be detected; None if
    there is none."""
    if plan.logits_processors:
        return "logits processors"
    if plan.speculation is not None and plan.speculation.drafter_class is not None:
        return plan.speculation.drafter_class
    draft = plan.draft_model
    models = (plan.model_class, *(() if draft is None else (draft.model_class,)))
    for part in (*models, type(plan.attention)):
        if part.__module__.partition(".")[0] not in (jaxllm.__name__, jaxllm_kernels.__name__):
            return f"{part.__module__}.{part.__qualname__}"
    return None


def _text(value: Any) -> str:
    if isinstance(value, Mesh):
        return str(dict(value.shape))
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, jax.ShapeDtypeStruct):
        spec = getattr(value.sharding, "spec", None)
        return f"{value.dtype}{list(value.shape)} {spec}"
    if isinstance(value, StagePlan | DraftPlan):
        fields = (
            getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.name not in _NOT_IN_PROGRAMS
        )
        kind = "stage" if isinstance(value, StagePlan) else "draft"
        return f"{kind} {', '.join(map(_text, fields))}"
    if isinstance(value, Speculation):
        # Where a draft model or a head is does not matter.
        return repr(dataclasses.replace(value, draft_model=None, head=None))
    return repr(value)


def _place(device: Device) -> str:
    coords = getattr(device, "coords", None)
    core = getattr(device, "core_on_chip", 0)
    return f"{device.id} of process {device.process_index} at {coords}.{core}"


def _flags() -> str:
    """The compiler flags of the environment, which change programs."""
    words = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
    return " ".join(sorted(w for w in words if not w.startswith(_FLAGS_BESIDE_PROGRAMS)))


@functools.cache  # the process runs the sources that it loaded, even if the files change
def _sources() -> str:
    """A hash of every file of both packages that can affect programs."""
    digest = hashlib.sha256()
    for package in (jaxllm, jaxllm_kernels):
        assert package.__file__ is not None
        root = Path(package.__file__).parent
        for path in sorted(root.rglob("*")):
            if path.is_file() and not _BESIDE_PROGRAMS.intersection(path.relative_to(root).parts):
                digest.update(f"{package.__name__}/{path.relative_to(root).as_posix()}\n".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _hash(text: str) -> str:
    return "sha256 " + hashlib.sha256(text.encode()).hexdigest()
