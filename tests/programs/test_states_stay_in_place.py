"""Steps of models with states change states and snapshots in place: a copy of all slots' states
would cost more than the rows."""

import pytest

from jaxllm.config import EngineArgs
from jaxllm.plan.buckets import Bucket
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import copies
from jaxllm.testing import make_tiny_checkpoint

NUM_SLOTS, NUM_SNAPSHOTS = 128, 200


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("family", "drafts"), [("qwen3_5", None), ("mamba2", None), ("mamba2", DRAFTS)]
)
def test_a_small_step_copies_no_array_of_states(tmp_path, family, drafts):
    """A step of decodes, or of one row with drafts."""
    model = make_tiny_checkpoint(tmp_path, family)
    plan = make_plan(
        EngineArgs(
            str(model),
            max_model_len=64,
            max_num_seqs=NUM_SLOTS,
            num_gpu_blocks_override=64,
            num_state_snapshots=NUM_SNAPSHOTS,
            speculative_config=drafts,
        )
    )
    programs = declare_programs(plan, make_packer(plan).layouts)
    smallest = min(
        (k for k in programs if isinstance(k, Bucket) and k.decode_only == (drafts is None)),
        key=lambda key: key.num_tokens,
    )
    hlo = programs[smallest].compile(programs[smallest].lower()).as_text()
    assert hlo is not None
    (stage,) = plan.stages
    of_layers = (*stage.state_shapes, *stage.snapshot_shapes)
    shapes = {array.shape for its in of_layers for array in its}
    assert {shape[0] for shape in shapes} == {NUM_SLOTS, NUM_SNAPSHOTS}
    assert not [copy for copy in copies(hlo) if tuple(copy.shape) in shapes]
