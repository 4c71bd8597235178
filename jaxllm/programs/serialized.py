"""Compiled programs as bytes.

JAX serializes them as pickles, so **loading one runs the code in it**. Only this module may
unpickle. A caller must have verified the origin of the bytes.
"""

import hashlib
import pickle
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh
from jaxllm_kernels.compat import prepare_to_load_programs


def to_bytes(compiled: jax.stages.Compiled) -> bytes:
    executable, *trees = serialize_executable.serialize(compiled)
    return _pack(executable, trees)


def from_bytes(data: bytes, mesh: Mesh) -> jax.stages.Compiled:
    """Load an executable for these devices."""
    executable, trees = pickle.loads(data)
    devices = list(mesh.devices.flat)
    prepare_to_load_programs(devices[0])
    return serialize_executable.deserialize_and_load(
        executable, *pickle.loads(trees), backend=devices[0].client, execution_devices=devices
    )


def called_as(data: bytes, lowered: jax.stages.Lowered) -> bytes:
    """The same executable with the arguments and results of a lowered program. Their classes may
    have changed since it was compiled: those that it was compiled with are not loaded."""
    executable, _ = pickle.loads(data)
    return _pack(executable, [jax.tree.structure(lowered.args_info), lowered.out_tree])


def _pack(executable: bytes, trees: list[Any]) -> bytes:
    return pickle.dumps((executable, pickle.dumps(trees)))


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
