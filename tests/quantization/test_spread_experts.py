"""Experts whose weights are codes, spread over devices: each device has the codes and the scales of
its own experts, a process reads no others, and answers are those of one device."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxllm.testing import make_tiny_checkpoint
from jaxllm.weights.checkpoint import open_checkpoint
from jaxllm.weights.loader import parameters_of, sources_of
from tests.models.conftest import SingleRow
from tests.quantization.checkpoints import write_format
from tests.quantization.formats import FORMATS, fp8_blocks, pack_quantized
from tests.quantization.test_experts import write_gpt_oss

NUM_EXPERTS = 8
# Of which the kernels for CPUs take codes of 4 bits.
ONE_LAYER = {"hidden_size": 128, "num_hidden_layers": 1}
QWEN3 = ONE_LAYER | {
    "num_experts": NUM_EXPERTS,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [],
}
MIXTRAL = ONE_LAYER | {"num_local_experts": NUM_EXPERTS, "intermediate_size": 128}
PARAMS = {"w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Kind of scales -> the directory of a model, and what is asked of its weights."""
    path = tmp_path_factory.mktemp("coded")
    groups = pack_quantized(4, 32, symmetric=False)
    per_output, _ = write_format(path / "o", FORMATS["packed-8-channels"], "qwen3_moe", **QWEN3)
    in_groups, _ = write_format(path / "g", groups, "mixtral", **MIXTRAL)
    in_blocks, _ = write_format(path / "b", fp8_blocks(24, 32), "minimax_m2", **ONE_LAYER)
    return {
        "a scale per output": (per_output, None),
        "groups with zeros": (in_groups, None),
        "blocks": (in_blocks, None),
        "powers of two": (write_gpt_oss(path / "p", num_hidden_layers=1)[0], None),
        "made at load": (make_tiny_checkpoint(path / "m", "qwen3_moe", **QWEN3), "int4"),
    }


ON_DEVICES = """
import os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "cpu"

import json
from pathlib import Path
import jax
import numpy as np
from jaxllm_kernels.dense.api import XLA_CODED
from jaxllm_kernels.experts.native import NativeExperts
from jaxllm_kernels.experts.xla import XLA_EXPERTS
from jaxllm_kernels.native.library import Library, load
from jaxllm.quantization.products import Products
from tests.models.conftest import SingleRow

PROMPT = [5, 77, 201, 9, 300, 41, 8, 123, 64, 250, 17]
library = load(Path(sys.argv[2]), ("float32",))
native = (NativeExperts(library),) if isinstance(library, Library) else ()
products = Products(linear=(XLA_CODED,), experts=(*native, XLA_EXPERTS))

def run(model, quantization, num_shards):
    model = SingleRow(
        Path(model), quantization=quantization, num_shards=num_shards,
        spreads_experts=True, products=products,
    )
    (layer,) = model.abstract_model.model.layers
    experts = model.weights["model"]["layers"][0][layer.spec.ffns[0].name]["experts"]
    shards = {
        name: [list(shard.data.shape) for shard in leaf[...].addressable_shards]
        for name, leaf in experts.items()
    }
    shapes = {name: list(leaf.shape) for name, leaf in experts.items()}
    logits = model.logits(PROMPT)[:, :384].tolist()
    return {"shapes": shapes, "shards": shards, "logits": logits}

models = json.loads(sys.argv[1])
print(json.dumps({
    name: {n: run(*model, n) for n in (1, int(sys.argv[3]))} for name, model in models.items()
}))
"""


@pytest.fixture(scope="module", params=[4, pytest.param(2, marks=pytest.mark.sweep)])
def num_devices(request):
    return request.param


@pytest.fixture(scope="module")
def runs(models, native_kernels_dir, num_devices):
    """What each model has and answers on one device and on some."""
    asked = json.dumps({name: (str(path), method) for name, (path, method) in models.items()})
    process = subprocess.run(
        [sys.executable, "-c", ON_DEVICES, asked, str(native_kernels_dir), str(num_devices)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


KINDS = ["a scale per output", "groups with zeros", "blocks", "powers of two", "made at load"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_devices_gives_the_same_logits(runs, kind, num_devices):
    of_one = np.array(runs[kind]["1"]["logits"])
    assert np.ptp(of_one) > 1
    logits = runs[kind][str(num_devices)]["logits"]
    np.testing.assert_allclose(logits, of_one, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_device_has_the_codes_and_scales_of_its_experts(runs, kind, num_devices):
    for number in (1, num_devices):
        run = runs[kind][str(number)]
        assert {"w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"} <= set(
            run["shapes"]
        )
        for name, (num_experts, *sizes) in run["shapes"].items():
            assert num_experts == NUM_EXPERTS
            share = [NUM_EXPERTS // number, *sizes]
            assert run["shards"][name] == number * [share]


class Recorder:
    """An open checkpoint that notes which experts are read."""

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint
        self.experts = set()

    def copy(self, name, box, target, kind="float"):
        parts = name.split(".")
        number = parts[parts.index("experts") + 1]
        of_all = range(box[0].start, box[0].stop)
        self.experts |= {int(number)} if number.isdecimal() else set(of_all)
        self.checkpoint.copy(name, box, target, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_reads_only_its_experts(models, kind):
    path, quantization = models[kind]
    model = SingleRow(path, quantization=quantization, spreads_experts=True)
    parameters = parameters_of(model.abstract_model)
    with open_checkpoint(path) as checkpoint:
        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        sources = sources_of(parameters, model.abstract_model.checkpoint_map.for_tensors(shapes))
        of_experts = [name for name in parameters if ".experts." in name]
        assert len(of_experts) >= 4
        for name in of_experts:
            recorder, shape = Recorder(checkpoint), parameters[name].shape
            box = (slice(4, 6), *(slice(0, size) for size in shape[1:]))
            target = np.empty((2, *shape[1:]), parameters[name].dtype)
            sources[name].copy(recorder, box, target)
            assert recorder.experts == {4, 5}, name
