"""The input and settings of a batch. A run that resumes it must have the same."""

import os
import uuid
from pathlib import Path
from typing import Any

import msgspec

from jaxllm.batch.journal import sync_folder
from jaxllm.batch.storage import Fingerprint
from jaxllm.errors import JaxLLMError, ValidationError

_VERSION = 1

# Engine options that affect where and how fast a model runs, but not its answers. A resumed batch
# may change them, for example on another machine.
_MAY_CHANGE = {
    "async_scheduling",
    "check_invariants",
    "compilation_cache_dir",
    "compile_behind",
    "data_parallel_size",
    "distributed_executor_backend",
    "download_dir",
    "enable_expert_parallel",
    "enforce_eager",
    "engine_heartbeat_timeout",
    "engine_iteration_timeout",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kv_cache_request_len",
    "kv_ip",
    "kv_offloading_backend",
    "kv_offloading_path",
    "kv_offloading_path_size",
    "kv_offloading_size",
    "kv_port",
    "kv_role",
    "kv_secret_file",
    "kv_timeout",
    "long_prefill_token_threshold",
    "mamba_block_size",
    "master_addr",
    "master_port",
    "max_num_batched_tokens",
    "max_num_seqs",
    "nnodes",
    "node_rank",
    "num_gpu_blocks_override",
    "num_state_snapshots",
    "otlp_traces_endpoint",
    "otlp_traces_protocol",
    "pipeline_parallel_size",
    "profile_dir",
    "program_bundle",
    "tensor_parallel_size",
}


class Manifest(msgspec.Struct, kw_only=True):
    """The first file of a batch; `is_delivered` is set last."""

    version: int = _VERSION
    batch_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex[:12])
    input: Fingerprint
    settings: dict[str, Any]
    is_delivered: bool = False


def make_manifest(
    input_file: Fingerprint, settings: dict[str, Any], engine_options: dict[str, Any]
) -> Manifest:
    """Make the manifest of a new batch."""
    kept = {name: value for name, value in engine_options.items() if name not in _MAY_CHANGE}
    # Normalise as by a round trip through JSON; other values become their repr.
    plain = msgspec.json.decode(msgspec.json.encode({**settings, **kept}, enc_hook=repr))
    return Manifest(input=input_file, settings=plain)


def read_manifest(path: Path) -> Manifest | None:
    """Read the manifest, if there is one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise JaxLLMError(f"{path} is damaged: {error}; {_anew(path)}") from None
    if manifest.version != _VERSION:
        raise JaxLLMError(
            f"{path} is of another version of jaxllm (format {manifest.version}, not {_VERSION}); "
            f"go on with that version, or {_anew(path)}"
        )
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest atomically."""
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb") as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def check_same_batch(path: Path, begun: Manifest, now: Manifest) -> None:
    """Refuse to resume with another input or other settings."""
    differences = []
    if begun.input.size != now.input.size:
        differences.append(f"the input had {begun.input.size} bytes and has {now.input.size}")
    elif begun.input != now.input:
        differences.append("the content of the input is another")
    for name in sorted(begun.settings.keys() | now.settings.keys()):
        was, given = begun.settings.get(name), now.settings.get(name)
        if was != given:
            differences.append(f"{name} was {was!r:.80} and is {given!r:.80}")
    if differences:
        raise ValidationError(
            f"this batch was begun with something else: {'; '.join(differences)}. Give what it was "
            f"begun with, give another output, or {_anew(path)}"
        )


def _anew(path: Path) -> str:
    return f"delete {path.parent} and the outputs to start anew"
