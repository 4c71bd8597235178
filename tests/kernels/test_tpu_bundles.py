"""The TPU kernels do not grow unnoticed: instruction bundles and register spills, per compiler.

A bundle is what a core issues in a cycle, so the count of a kernel's code is a stable measure of
its size. It is no time: loops are counted once. The numbers of tpu_bundles.json are of one libtpu;
with another the test is skipped. To write them anew: python tests/kernels/test_tpu_bundles.py
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("tpu_bundles.json")
KERNELS = tuple(f"ragged_paged_attention_{kind}" for kind in ("decode", "short", "prefill"))
CHIPS = ("v5e", "v6e", "v7x")

# The flags are read once per process, so every chip has one.
COMPILE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("programs", sys.argv[1])
programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(programs)
devices = programs.topology_devices(programs.SLICES[sys.argv[2]])
programs.Program().compile(devices[:1])
programs.Program(decode_only=True).compile(devices[:1])
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
        programs = str(Path(__file__).with_name("test_tpu_compile.py"))
        subprocess.run(
            [sys.executable, "-c", COMPILE, programs, chip],
            env=environment,
            check=True,
            capture_output=True,
        )
        found = {}
        for kernel in KERNELS:
            (path,) = Path(folder).glob(f"*{kernel}*[0-9]-final_bundles.txt")
            bundles = [line for line in path.read_text().splitlines() if re.match(r" *0x", line)]
            spills = sum(bool(re.search(r"vst.*_spill", line)) for line in bundles)
            found[kernel] = {"bundles": len(bundles), "spills": spills}
        return found


def libtpu_version() -> str | None:
    return importlib.metadata.version("libtpu") if importlib.util.find_spec("libtpu") else None


@pytest.mark.tpu_compile
@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_do_not_grow(chip):
    record = json.loads(RECORD.read_text())
    if libtpu_version() != record["libtpu"]:
        pytest.skip(f"counted with libtpu {record['libtpu']}, this is {libtpu_version()}")
    for kernel, now in measure(chip).items():
        before = record["chips"][chip][kernel]
        # A few spills come and go with the compiler's mood; a twentieth of the code does not.
        assert now["bundles"] <= 1.05 * before["bundles"], kernel
        assert now["spills"] <= 1.05 * before["spills"] + 20, kernel


if __name__ == "__main__":
    counted = {"libtpu": libtpu_version(), "chips": {chip: measure(chip) for chip in CHIPS}}
    RECORD.write_text(json.dumps(counted, indent=2) + "\n")
