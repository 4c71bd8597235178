"""What all ranks of an engine must have alike: as many blocks and snapshots, and one plan."""

import json

import msgspec
import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import JaxLLMError
from jaxllm.executor.layout import Layout, check_alike
from jaxllm.executor.wire import Fits
from jaxllm.testing import make_tiny_checkpoint
from tests.pooling.models import BERT
from tests.profile import TINY


def layout(path, family, **options):
    return Layout(EngineConfig.create(make_tiny_checkpoint(path, family), **TINY | options))


def test_a_plan_has_as_many_blocks_and_snapshots_as_fit_everywhere(tmp_path):
    its = layout(tmp_path, "lfm2", kv_offloading_size=0.01)
    here = its.what_fits(0)[0]
    assert here == Fits(64, 8)
    agreed = here.on_both(Fits(70, 3))
    assert agreed == Fits(64, 3)
    info = its.plan(0, agreed).info()
    assert (info.cache_groups[0].num_blocks, info.snapshots.count) == (64, 3)
    # If one rank has room for none, none keeps any.
    with pytest.raises(JaxLLMError, match="raise num_state_snapshots"):
        its.plan(0, here.on_both(Fits(64, 0)))
    without = layout(tmp_path, "lfm2")
    assert without.plan(0, here.on_both(Fits(64, 0))).snapshots is None


def test_a_model_without_states_has_no_snapshots_to_agree_on(tmp_path):
    decoder = layout(tmp_path / "decoder", "llama")
    assert decoder.what_fits(0)[0].on_both(Fits(50, None)) == Fits(50, None)
    assert decoder.plan(0, Fits(50, None)).num_blocks == 50
    # An encoder has mixers of its own, which keep nothing.
    made = make_tiny_checkpoint(tmp_path / "encoder")
    fields = BERT | {"model_type": "bert", "architectures": ["BertModel"]}
    (made / "config.json").write_text(json.dumps(fields))
    encoder = Layout(EngineConfig.create(made, **TINY | {"max_num_batched_tokens": 128}))
    fits = encoder.what_fits(0)[0]
    assert fits.num_snapshots is None
    assert encoder.plan(0, fits).num_blocks == fits.num_blocks


def test_ranks_that_have_planned_otherwise_are_refused_by_name(tmp_path):
    its = layout(tmp_path, "llama", kv_offloading_size=0.01)
    info = its.plan(0, its.what_fits(0)[0]).info()
    check_alike(0, {0: info, 1: msgspec.structs.replace(info, model_dir="elsewhere")})
    other = msgspec.structs.replace(info, host_places=(7,))
    with pytest.raises(JaxLLMError, match=r"rank 2 has planned replica 1 with host_places \(7,\)"):
        check_alike(1, {0: info, 2: other})
