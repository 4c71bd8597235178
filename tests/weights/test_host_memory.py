"""Loading takes no more of the host's memory than what stays: the process's share of the weights.

Pages of the checkpoint that are mapped count as the process's memory, too, until they are let go.
"""

import json
import subprocess
import sys

import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.testing import make_tiny_checkpoint
from tests.ports import free_port

MIB = 1 << 20
# What JAX and the loader themselves come to need, whatever the size of the checkpoint.
CONSTANT = 80 * MIB

SCRIPT = """
import json, os, sys
model, address = sys.argv[1], sys.argv[5]
num_shards, process, num_processes = map(int, sys.argv[2:5])
os.environ["JAX_PLATFORMS"] = "cpu"
num_devices = num_shards // num_processes
os.environ["JAX_NUM_CPU_DEVICES"] = str(num_devices)
import jax, jax.numpy as jnp
if num_processes > 1:
    jax.distributed.initialize(address, num_processes, process)
from pathlib import Path
from jaxllm.models.architecture import read_architecture
from jaxllm.models.registry import ModelRegistry
from jaxllm.parallel.sharding import make_mesh
from jaxllm.plan.memory import peak_host_bytes
from jaxllm.files import read_json
from jaxllm.weights.loader import load_weights
architecture = read_architecture(read_json(Path(model) / "config.json"))
model_class = ModelRegistry.resolve([architecture.name])
abstract = model_class.abstract(architecture, jnp.bfloat16, num_shards)
mesh = make_mesh(jax.devices())
jax.block_until_ready(jnp.zeros(1))
before = peak_host_bytes()
weights = jax.tree.leaves(load_weights(Path(model), abstract, mesh=mesh))
jax.block_until_ready(weights)
share = sum(shard.data.nbytes for array in weights for shard in array.addressable_shards)
print(json.dumps([share, peak_host_bytes() - before]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """300 MiB in three files, and how many bytes that is."""
    path = make_tiny_checkpoint(
        tmp_path_factory.mktemp("model"),
        hidden_size=1024,
        intermediate_size=4096,
        vocab_size=32768,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        dtype="bfloat16",
    )
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {name: f"{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(part, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path, sum(tensor.nbytes for tensor in tensors.values())


def start(path, num_shards, process=0, num_processes=1, address=""):
    arguments = [str(path), *map(str, (num_shards, process, num_processes)), address]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def measured(process):
    """A process's share of the weights, and the memory that loading them took at most."""
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_process_with_all_devices_takes_the_weights(num_shards, checkpoint):
    path, num_bytes = checkpoint
    share, taken = measured(start(path, num_shards))
    # Norms are on both devices.
    assert num_bytes <= share < num_bytes + MIB
    assert taken < share + CONSTANT


@pytest.mark.slow
def test_each_of_two_processes_takes_half(checkpoint):
    path, num_bytes = checkpoint
    address = f"127.0.0.1:{free_port()}"
    processes = [start(path, 2, process, 2, address) for process in range(2)]
    for share, taken in map(measured, processes):
        assert num_bytes / 2 <= share < num_bytes / 2 + MIB
        assert taken < share + CONSTANT
