"""Compiled programs as bytes.

JAX serializes them as pickles, so **loading one runs the code in it**. Only this module may
unpickle. A caller must have verified the origin of the bytes.
"""

import hashlib
import pickle

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh


def to_bytes(compiled: jax.stages.Compiled) -> bytes:
    return pickle.dumps(serialize_executable.serialize(compiled))


def from_bytes(data: bytes, mesh: Mesh) -> jax.stages.Compiled:
    """Load an executable for these devices."""
    devices = list(mesh.devices.flat)
    return serialize_executable.deserialize_and_load(
        *pickle.loads(data), backend=devices[0].client, execution_devices=devices
    )


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
