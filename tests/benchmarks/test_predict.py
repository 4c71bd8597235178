"""The cycles of a compiled step are read from its text and go to the part that they belong to."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

HLO = """HloModule jit_step

%fused (p: bf16[8,4]) -> bf16[8,4] {
  ROOT %inner = bf16[8,4]{1,0} negate(%p), backend_config={"estimated_cycles":"7"}
}

ENTRY %main (a: bf16[8,4]) -> bf16[8,4] {
  %a = bf16[8,4]{1,0} parameter(0)
  %gate = bf16[8,4]{1,0} fusion(%a), kind=kOutput, calls=%fused, \
metadata={op_name="jit(step)/jit(_layer)/mlp/dot_general"}, backend_config={"estimated_cycles":"90"}
  %turn = bf16[8,4]{1,0} fusion(%gate), kind=kLoop, calls=%fused, \
metadata={op_name="jit(step)/jit(_layer)/attention/concatenate"}, \
backend_config={"estimated_cycles":"20"}
  %heads = (bf16[8,4]{1,0}, bf16[2]{0}) custom-call(%turn), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/attention/pallas_call"}
  %out = bf16[8,4]{1,0} get-tuple-element(%heads), index=0
  ROOT %moved = bf16[8,4]{0,1} copy(%out), \
metadata={op_name="jit(step)/sample/logits/dot_general"}, backend_config={"estimated_cycles":"5"}
}
"""


@pytest.fixture
def predict(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("predict", BENCHMARKS / "predict.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "predict", module)
    spec.loader.exec_module(module)
    return module


def test_cycles_of_the_entry_are_added_up_by_part(predict):
    costs = predict.costs_of(HLO, temp_bytes=3)
    assert +costs.cycles == {"mlp: products": 90, "attention: the rest": 20, "sampler": 5}
    assert (costs.num_operations, costs.num_kernels, costs.temp_bytes) == (4, 1, 3)


def test_text_without_an_entry_is_refused(predict):
    with pytest.raises(AssertionError, match="no entry"):
        predict.costs_of("HloModule empty", temp_bytes=0)
