"""The TPU kernels do not grow unnoticed: instruction bundles and register spills, per compiler.

A bundle is what a core issues in a cycle, so the count of a kernel's code is a stable measure of
its size. It is no time: loops are counted once. The numbers of tpu_bundles.json are of one libtpu;
with another none are compared. To write them anew: python tests/kernels/test_tpu_bundles.py
"""

import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from jaxllm_kernels.platform import CHIPS as CHIP_FACTS
from jaxllm_kernels.ragged_self_attention.tpu_sizes import Heads, choose_sizes

RECORD = Path(__file__).with_name("tpu_bundles.json")
KERNELS = tuple(f"ragged_paged_attention_{kind}" for kind in ("decode", "short", "prefill"))
LATENTS = tuple(f"latent_attention_{kind}" for kind in ("decode", "short", "prefill"))
KERNELS += (*LATENTS, "experts_few", "experts_many", "delta_decode", "delta_tiles", "ssd_decode")
KERNELS += ("ssd_tiles", "self_attention")
# Those whose longest code is that of a block of what they read.
WITH_BLOCKS = (*LATENTS, "delta_decode", "delta_tiles", "ssd_decode", "ssd_tiles")
WITH_BLOCKS += ("self_attention",)
CHIPS = ("v5e", "v6e", "v7x")

# The flags are read once per process, so every chip has one.
COMPILE = """
import importlib.util, sys

def load(name):
    spec = importlib.util.spec_from_file_location(name, f"{sys.argv[1]}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

programs = load("test_tpu_compile")
devices = programs.topology_devices(programs.SLICES[sys.argv[2]])
# What test_tpu_compile.py wants of other programs is true of this, which it does not compile again.
hlo = programs.assert_compiles(programs.Program(), devices[:1])
if sys.argv[2] in ("v5e", "v6e"):
    programs.assert_decodes_are_put_beside_prefills_without_copying_these(hlo)
programs.Program(decode_only=True).compile(devices[:1])
latents = load("test_tpu_mla_compile")
for decode_only in (False, True):
    latents.compile_latents(devices[0], num_heads=16, decode_only=decode_only)
experts = load("test_tpu_experts_compile")
model = experts.MODELS["Qwen3-30B-A3B, whole experts on 8 devices"]
for num_tokens in (64, 2048):
    experts.compile_experts(model, num_tokens, devices[0])
load("test_tpu_delta_compile").compile_delta(devices[0], decode_only=False)
load("test_tpu_ssd_compile").compile_mamba(devices[0], decode_only=False)
attention = load("test_tpu_self_attention_compile")
attention.compile_layer(devices[0], attention.MODELS["MiniLM"], alone=True)
"""


def measure(chip: str) -> dict[str, dict[str, int]]:
    """Bundles and spills of each kernel's code for a chip."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "xla_jf_dump_to": folder,
            "xla_jf_dump_llo_text": "true",
            "xla_jf_dump_llo_pass_label_regex": ".*final_bundles.*",
        }
        environment = os.environ | {
            "LIBTPU_INIT_ARGS": " ".join(f"--{name}={value}" for name, value in flags.items()),
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, "-c", COMPILE, str(Path(__file__).parent), chip]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = {}
        for kernel in KERNELS:
            (path,) = Path(folder).glob(f"*{kernel}*[0-9]-final_bundles.txt")
            bundles = [line for line in path.read_text().splitlines() if re.match(r" *0x", line)]
            spills = sum(bool(re.search(r"vst.*_spill", line)) for line in bundles)
            found[kernel] = {"bundles": len(bundles), "spills": spills}
            if kernel in WITH_BLOCKS:
                found[kernel]["longest"] = longest_stretch(bundles)
        return found


def longest_stretch(bundles: list[str]) -> int:
    """Bundles of the longest code between two labels: the longest without a branch to elsewhere."""
    labels = [i for i, line in enumerate(bundles) if re.match(r" *0x[0-9a-f]+ +[A-Z]{2}:", line)]
    return max(end - start for start, end in itertools.pairwise([0, *labels, len(bundles)]))


def libtpu_version() -> str | None:
    return importlib.metadata.version("libtpu") if importlib.util.find_spec("libtpu") else None


@pytest.mark.tpu_compile
@pytest.mark.skipif(libtpu_version() is None, reason="libtpu is not installed")
@pytest.mark.parametrize("chip", [pytest.param("v5e", marks=pytest.mark.sweep), *CHIPS[1:]])
def test_kernels_do_not_grow(chip):
    counted = measure(chip)  # and other things of the programs, with any libtpu
    record = json.loads(RECORD.read_text())
    if libtpu_version() != record["libtpu"]:
        pytest.skip(f"counted with libtpu {record['libtpu']}, this is {libtpu_version()}")
    for kernel, now in counted.items():
        before = record["chips"][chip][kernel]
        # A few spills come and go with the compiler's mood; a twentieth of the code does not.
        assert now["bundles"] <= 1.05 * before["bundles"], kernel
        assert now.get("longest", 0) <= 1.05 * before.get("longest", 0), kernel
        assert now["spills"] <= 1.05 * before["spills"] + 20, kernel


# Cycles per second, as the compilers' schedules have them.
CLOCKS = {"v5e": 1.5e9, "v6e": 1.75e9, "v7x": 1.9e9}


@pytest.mark.parametrize("chip", CHIPS)
def test_experts_of_few_tokens_are_computed_faster_than_they_are_read(chip):
    # The kernel's code has a step of each kind, without loops: of 64 tokens with 384 intermediate
    # values, and with 2048 outputs of 768.
    read = (2 * 384 * 2048 + 2048 * 768) * 2 / CHIP_FACTS[chip].hbm_bytes_per_second
    bundles = json.loads(RECORD.read_text())["chips"][chip]["experts_few"]["bundles"]
    assert bundles / CLOCKS[chip] <= 0.7 * read


@pytest.mark.parametrize("chip", CHIPS)
def test_decodes_of_latents_are_computed_faster_than_they_are_read(chip):
    # The longest code of a decode is that of 1024 keys, without masks: rows of 640 for 16 heads.
    read = 1024 * 640 * 2 / CHIP_FACTS[chip].hbm_bytes_per_second
    bundles = json.loads(RECORD.read_text())["chips"][chip]["latent_attention_decode"]["longest"]
    assert bundles / CLOCKS[chip] <= (0.8 if chip == "v7x" else 0.5) * read


@pytest.mark.parametrize("chip", CHIPS)
def test_decodes_of_the_delta_rule_are_computed_faster_than_states_are_moved(chip):
    # A block has 16 heads of 128 x 128, which are read and written.
    moved = 2 * 16 * 128 * 128 * 4 / CHIP_FACTS[chip].hbm_bytes_per_second
    bundles = json.loads(RECORD.read_text())["chips"][chip]["delta_decode"]["longest"]
    assert bundles / CLOCKS[chip] <= (0.9 if chip == "v7x" else 0.5) * moved


# The code of tiles over the time of their products: heads of 64 tokens fill a quarter of v6e's and
# v7x's matrix units.
MOST_OF_PRODUCTS = {"v5e": 2.4, "v6e": 8.5, "v7x": 8.8}


@pytest.mark.parametrize("chip", CHIPS)
def test_tiles_of_the_delta_rule_are_not_much_longer_than_their_products(chip):
    # The longest code is that of four heads, whose products would take so long on float32 as six
    # of bfloat16: those of two key heads, of states, and of triangular matrices.
    square, state = 64 * 64 * 64, 64 * 128 * 128
    products = 2 * (4 * (4 + 4) * square + 2 * 4 * square + 4 * 3 * state)
    least = 6 * products / CHIP_FACTS[chip].bf16_flops_per_second
    bundles = json.loads(RECORD.read_text())["chips"][chip]["delta_tiles"]["longest"]
    assert bundles / CLOCKS[chip] <= MOST_OF_PRODUCTS[chip] * least


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_decodes_of_mamba2_are_computed_faster_than_states_are_moved(chip):
    # A block has 32 heads of 64 x 128, which are read and written. On v7x computing takes longer.
    moved = 2 * 32 * 64 * 128 * 4 / CHIP_FACTS[chip].hbm_bytes_per_second
    bundles = json.loads(RECORD.read_text())["chips"][chip]["ssd_decode"]["longest"]
    assert bundles / CLOCKS[chip] <= 0.7 * moved


@pytest.mark.parametrize(("chip", "most"), [("v5e", 3.1), ("v6e", 2.2), ("v7x", 2.4)])
def test_self_attention_takes_few_bundles_for_a_register_of_scores(chip, most):
    # The longest code is that of a block of keys with masks, for the heads of a step.
    heads, dtype = Heads(12, 12, 32), "bfloat16"
    sizes = choose_sizes(4096, heads, dtype, CHIP_FACTS[chip])
    bundles = json.loads(RECORD.read_text())["chips"][chip]["self_attention"]["longest"]
    assert bundles <= most * sizes.heads * sizes.block * sizes.tile / 1024


if __name__ == "__main__":
    counted = {"libtpu": libtpu_version(), "chips": {chip: measure(chip) for chip in CHIPS}}
    RECORD.write_text(json.dumps(counted, indent=2) + "\n")
