"""What a process of ours writes to its stderr, as its user sees it."""

import os
import re
import subprocess
import sys

import pytest

from jaxllm.testing import make_tiny_checkpoint

# Plans an engine on kernels of whose sizes nothing is measured.
SCRIPT = """
import sys
from jaxllm_kernels.ragged_paged_attention.api import register_backend
from jaxllm_kernels.ragged_paged_attention.tpu import TpuBackend
from jaxllm.config import EngineConfig
from jaxllm.logging import name_process
from jaxllm.plan.make_plan import make_plan
register_backend(TpuBackend(name="emulated", chip="v5e", interpret=True))
name_process("engine 3")
for _ in range(2):
    make_plan(EngineConfig.create(
        sys.argv[1], attention_backend="emulated", kv_cache_memory_bytes=1 << 22,
        native_kernels=False, dtype="float32", compilation_cache_dir="",
    ))
"""


@pytest.mark.parametrize(("level", "expected"), [(None, 2), ("WARNING", 0)])
def test_sizes_that_nobody_measured_are_told_once_for_each_kernel(tmp_path, level, expected):
    model = make_tiny_checkpoint(tmp_path / "model", "llama")
    env = {name: value for name, value in os.environ.items() if name != "JAXLLM_LOGGING_LEVEL"}
    env |= {"JAX_PLATFORMS": "cpu"} | ({"JAXLLM_LOGGING_LEVEL": level} if level else {})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "nothing measured for" in line]
    assert len(told) == len(set(told)) == expected, done.stderr
    for line, kernel in zip(sorted(told), ("tpu_decode", "tpu_prefill"), strict=False):
        start = r"engine 3: INFO [\d:]+ jaxllm_kernels\.ragged_paged_attention\.tuned: "
        assert re.match(f"{start}{kernel} on v5e: nothing measured", line)
