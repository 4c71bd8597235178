"""Compiled programs as bytes.

JAX keeps them as pickles, so **loading one runs what is in it**; this is the only module that may
unpickle. Who loads has made sure where the bytes are from.
"""

import hashlib
import pickle

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh


def to_bytes(compiled: jax.stages.Compiled) -> bytes:
    return pickle.dumps(serialize_executable.serialize(compiled))


def from_bytes(data: bytes, mesh: Mesh) -> jax.stages.Compiled:
    """The executable, on these devices."""
    devices = list(mesh.devices.flat)
    return serialize_executable.deserialize_and_load(
        *pickle.loads(data), backend=devices[0].client, execution_devices=devices
    )


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
