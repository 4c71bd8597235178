"""A GPU's programs with kernels of Mosaic are found by the next process, which traces none."""

import subprocess
import sys

import jax
import pytest
from jaxllm_kernels.platform import chip_of

from tests.kernels.sass import why_no_assembler

PREPARE = """
import os
from jaxllm_kernels.compat import prepare_to_load_programs
from jaxllm_kernels.topology import topology_devices

prepare_to_load_programs(topology_devices("h200")[0])
print(os.path.exists(os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"]))
"""

ENGINE = """
import sys
from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint

model = make_tiny_checkpoint(sys.argv[1] + "/model")
llm = LLM(
    str(model), dtype="bfloat16", max_model_len=256, max_num_seqs=4, num_gpu_blocks_override=64,
    compilation_cache_dir=sys.argv[1] + "/cache",
)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
print("TOKENS", llm.generate([{"prompt_token_ids": [7, 8, 9]}], params)[0].outputs[0].token_ids)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return process


@pytest.mark.gpu_compile
@pytest.mark.skipif(bool(why_no_assembler()), reason=str(why_no_assembler()))
def test_the_library_of_kernels_is_known_before_programs_are_loaded():
    assert run(PREPARE).stdout.split() == ["True"]


@pytest.mark.gpu
def test_the_second_start_compiles_nothing(tmp_path):
    if chip_of(jax.devices()[0]).platform != "gpu":
        pytest.skip("needs a GPU")
    first, second = (run(ENGINE, str(tmp_path)) for _ in range(2))
    assert "is not taken" not in first.stderr + second.stderr
    assert ": 0 compiled" in second.stderr
    assert first.stdout == second.stdout
