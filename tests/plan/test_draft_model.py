"""What a plan says of a model that drafts: which one fits, and what it takes."""

import json
import shutil

import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer, num_programs
from jaxllm.programs.drafting import DRAFT_AHEAD, ReadKey
from jaxllm.programs.hlo import whole_array_copies
from jaxllm.programs.summary import summary
from jaxllm.quantization.linear import CodedLinear
from jaxllm.testing import make_tiny_checkpoint
from tests.quantization.checkpoints import INT8, compressed, write_both

BASE = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32,
    "block_size": 8, "num_gpu_blocks_override": 24,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture
def draft(tmp_path):
    return make_tiny_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1)


def plan(model, draft=None, **options):
    fields = {} if draft is None else {"spec_model": draft, "spec_tokens": 3}
    return make_plan(EngineConfig.create(model, **{**BASE, **fields, **options}))


def edit(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_it_counts_the_draft(model, draft):
    alone, own, both = plan(model), plan(draft), plan(model, draft)
    assert both.weights_bytes == alone.weights_bytes + own.weights_bytes
    assert both.kv_cache_bytes == alone.kv_cache_bytes + own.kv_cache_bytes
    assert both.stages[0].weights.num_bytes == alone.weights_bytes
    assert "draft LlamaForCausalLM, 1 layer" in summary(both)
    # The same bytes have room for fewer blocks.
    room = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": alone.kv_cache_bytes * 2}
    fewer, blocks = plan(model, draft, **room).num_blocks, plan(model, **room).num_blocks
    per_block = both.kv_cache_bytes // both.num_blocks
    assert fewer == room["kv_cache_memory_bytes"] // per_block < blocks


def test_it_declares_what_reads_and_copies_no_cache(model, draft):
    both = plan(model, draft)
    programs = declare_programs(both, make_packer(both).layouts)
    assert len(programs) == num_programs(both)
    assert ReadKey(16) in programs and ReadKey(32) in programs
    verify = next(bucket for bucket in both.buckets if not bucket.decode_only)
    caches = [*both.stages[0].cache_shapes, *both.draft.cache_shapes]
    for key in (verify, ReadKey(16), DRAFT_AHEAD):
        compiled = programs[key].compile(programs[key].lower())
        assert not list(whole_array_copies(compiled.as_text(), caches))
        # Every cache is updated in place.
        assert compiled.memory_analysis().alias_size_in_bytes >= both.kv_cache_bytes


def test_padding_of_the_vocabulary_may_differ(model, draft):
    make_tiny_checkpoint(draft / "wider", "llama", vocab_size=448)
    shutil.copy(model / "tokenizer.json", draft / "wider")
    assert plan(model, draft / "wider").draft.architecture.vocab_size == 448
    (draft / "wider" / "tokenizer.json").unlink()
    with pytest.raises(ValidationError, match="it has vocab_size=448, the model has"):
        plan(model, draft / "wider")


def test_another_tokenizer_is_refused(model, draft):
    file = draft / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[7:9]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(content))
    with pytest.raises(ValidationError, match="has id . in the model's tokenizer and id"):
        plan(model, draft)


def test_a_short_draft_is_refused_unless_the_user_knows(model, draft):
    edit(draft / "config.json", max_position_embeddings=32)
    with pytest.raises(ValidationError, match="the draft model has 32 positions and the engine"):
        plan(model, draft)
    fields = {"model": draft, "max_model_len": 32}
    assert plan(model, speculative_config=fields).speculation.draft_model.max_model_len == 32
    with pytest.raises(ValidationError, match="max_model_len=33 is above the 32 positions"):
        plan(model, speculative_config=fields | {"max_model_len": 33})


def test_a_model_of_windows_only_is_refused(tmp_path, draft):
    model = make_tiny_checkpoint(tmp_path / "model", "mistral", sliding_window=16)
    with pytest.raises(ValidationError, match="every layer of the model has a window"):
        plan(model, draft)


@pytest.mark.parametrize(
    ("families", "message"),
    [
        (("deepseek_v3", "llama"), "the model keeps latents"),
        (("llama", "deepseek_v3"), "it keeps latents"),
    ],
)
def test_latents_are_refused(families, message, tmp_path):
    model, draft = (make_tiny_checkpoint(tmp_path / family, family) for family in families)
    with pytest.raises(ValidationError, match=message):
        plan(model, draft)


def test_a_quantised_draft_is_planned(model, tmp_path):
    config = compressed("int", "channel")
    draft, _ = write_both(tmp_path, config, INT8, (1, None), num_hidden_layers=1)
    planned = plan(model, draft).abstract_draft()
    assert isinstance(planned.model.layers[0].mlp.down_proj, CodedLinear)
