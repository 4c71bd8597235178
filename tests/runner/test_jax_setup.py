"""A libtpu that is installed is tried where there may be a TPU, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBTPU = """
import sys
def get_library_path():
    return "/nowhere/libtpu.so"
def configure_library_path():
    pass
"""
# Loading that library would fail, as would a TPU that is asked for and not there.
SCRIPT = """
import jax
from jaxllm.config import EngineConfig
from jaxllm.runner.jax_setup import set_up_jax
set_up_jax(EngineConfig.create("m", compilation_cache_dir=""))
print(jax.config.jax_platforms)
"""


@pytest.mark.parametrize(
    ("environment", "platforms"),
    [
        ({}, "cpu"),
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-4"}, "None"),
        ({"JAX_PLATFORMS": "tpu,cpu"}, "tpu,cpu"),
    ],
)
def test_libtpu_is_left_alone_without_a_tpu(environment, platforms, tmp_path):
    if any(Path("/dev").glob("accel*")) or any(Path("/dev").glob("vfio/[0-9]*")):
        pytest.skip("there may be a TPU")
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").write_text(LIBTPU)
    kept = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=kept | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == platforms
