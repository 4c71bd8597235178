"""What a plan says of a head that drafts: which one fits, and what it takes."""

import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer, num_programs
from jaxllm.programs.drafting import DRAFT_AHEAD
from jaxllm.programs.hlo import whole_array_copies
from jaxllm.programs.summary import summary
from jaxllm.testing import make_tiny_checkpoint
from tests.heads import make_eagle

BASE = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32,
    "block_size": 8, "num_gpu_blocks_override": 24,
}  # fmt: skip


def plan(model, method=None, head=None, **options):
    fields = {"method": method, "num_speculative_tokens": 3}
    if head is not None:
        fields["model"] = head
    speculation = {} if method is None else {"speculative_config": fields}
    return make_plan(EngineConfig.create(model, **{**BASE, **speculation, **options}))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def head(tmp_path_factory, model):
    return make_eagle(tmp_path_factory.mktemp("heads") / "head", model, "eagle")


def test_it_counts_the_head(model, head):
    alone, both = plan(model), plan(model, "eagle", head)
    # Two vectors in, one out, and a layer.
    assert both.weights_bytes - alone.weights_bytes > 4 * 2 * 64 * 64
    # It has one layer of the same attention, and the model has two.
    assert both.kv_cache_bytes == alone.kv_cache_bytes * 3 // 2
    assert both.stages[0].weights.num_bytes == alone.weights_bytes
    assert "draft EagleHead; of these bytes" in summary(both)


def test_it_declares_one_program_of_its_own_and_copies_no_cache(model, head):
    both = plan(model, "eagle", head)
    programs = declare_programs(both, make_packer(both).layouts)
    # Steps, the programs that sample their late rows, three that write the state, and the head's.
    num_late = len({(bucket.num_rows, bucket.decode_only) for bucket in both.buckets})
    assert len(programs) == num_programs(both) == len(both.buckets) + num_late + 4
    verify = next(bucket for bucket in both.buckets if not bucket.decode_only)
    caches = [*both.stages[0].cache_shapes, *both.draft.cache_shapes]
    for key in (verify, DRAFT_AHEAD):
        compiled = programs[key].compile(programs[key].lower())
        assert not list(whole_array_copies(compiled.as_text(), caches))
        assert compiled.memory_analysis().alias_size_in_bytes >= both.kv_cache_bytes


def test_a_layer_without_a_window_makes_a_group_of_its_own(tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", "mistral", sliding_window=16)
    head = make_eagle(tmp_path / "head", model, "eagle")
    assert [group.window for group in plan(model, "eagle", head).cache_groups] == [None, 16]


def test_what_has_no_head_is_refused(model, head, tmp_path):
    with pytest.raises(
        ValidationError, match="layers that draft are not read from checkpoints of LlamaFor"
    ):
        plan(model, "mtp")
    latents = make_tiny_checkpoint(tmp_path / "latents", "deepseek_v3")
    with pytest.raises(ValidationError, match="one of the model and the head keeps latents"):
        plan(latents, "eagle", head)
    with pytest.raises(ValidationError, match="heads are not run beside weights that are codes"):
        plan(model, "eagle", head, quantization="int8")
    wider = make_tiny_checkpoint(tmp_path / "wider", hidden_size=128)
    with pytest.raises(ValidationError, match="hidden_size=64 is not supported; supported is 128"):
        plan(wider, "eagle", head)
