"""Steps of encoders, and towers for images, compiled for H200s that are not there: tokens see each
other by the kernel, on several devices as well."""

import importlib.util
import json

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import EncodeKey, declare_programs, make_packer
from jaxllm.programs.hlo import collectives
from jaxllm.programs.launches import all_launches, by_name, compile_and_list
from jaxllm.programs.summary import summary
from tests.media.models import OPTIONS, make_model

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="no CUDA plugin of JAX: nothing is compiled for GPUs (see README)",
    ),
]

KERNEL = "ragged_self_attention_mosaic_gpu"
NUM_LAYERS = 6
# all-MiniLM-L6-v2.
MINILM = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 12,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 512,
    "vocab_size": 30522,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "torch_dtype": "bfloat16",
}


def num_kernels(hlo: str) -> int:
    """How often a program calls the kernel."""
    return sum(KERNEL in line and "custom-call(" in line for line in hlo.splitlines())


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_step_of_an_encoder(num_devices, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINILM))
    args = EngineArgs(
        model=str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=num_devices,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
    )
    plan = make_plan(args, topology_devices(f"h200-{num_devices}"))
    assert "attention to whole texts 'mosaic_sm90'" in summary(plan)
    declared = declare_programs(plan, make_packer(plan).layouts)
    program = declared[max(plan.buckets)]
    _, compiled, launches = compile_and_list(program, tmp_path / "dump")
    hlo = compiled.as_text()
    assert bool(collectives(hlo)) == (num_devices > 1)
    assert num_kernels(hlo) == NUM_LAYERS
    names = by_name(all_launches(launches))
    # A layer cuts queries, keys and values out of their projection in one launch. What tiles see
    # is computed once for all layers.
    assert names["loop_slice_fusion"] == NUM_LAYERS, names
    assert names["sort"] == 1, names


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_tower(num_devices, tmp_path):
    options = OPTIONS | {"tensor_parallel_size": num_devices, "dtype": "bfloat16"}
    args = EngineArgs(str(make_model(tmp_path)), **options)
    plan = make_plan(args, topology_devices(f"h200-{num_devices}"))
    assert "attention between patches 'mosaic_sm90'" in summary(plan)
    assert plan.images is not None
    declared = declare_programs(plan, make_packer(plan).layouts)
    program = declared[EncodeKey(plan.images.sizes[0])]
    hlo = program.compile(program.lower()).as_text()
    assert num_kernels(hlo) == 2
