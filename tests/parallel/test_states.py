"""A model whose layers keep states answers on several devices as on one: states and snapshots of
them are cut by heads, and each stage has those of its layers."""

import pytest

from jaxllm.testing import make_tiny_checkpoint
from tests.heads import add_mtp

SNAPSHOTS = {"mamba_block_size": 8, "num_state_snapshots": 16}
MTP = {"method": "mtp"}
VARIANTS = {
    "one": SNAPSHOTS,
    "stages of shards": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **SNAPSHOTS},
}


@pytest.fixture(scope="module")
def answered(engines, tmp_path_factory):
    """What each of these engines answers, twice."""
    model_dir = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_5")
    return dict(zip(VARIANTS, engines(model_dir, *VARIANTS.values(), again=True), strict=True))


@pytest.mark.slow
def test_several_devices_give_the_same_tokens(answered, same_answers):
    same_answers(answered["stages of shards"], answered["one"])


@pytest.mark.slow
@pytest.mark.sweep
def test_shards_with_drafts_give_the_same_tokens(engines, tmp_path, same_answers):
    model_dir = make_tiny_checkpoint(tmp_path, "qwen3_5")
    add_mtp(model_dir)
    drafts = {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3]],
    }
    one, *cut = engines(
        model_dir,
        SNAPSHOTS,
        *(
            SNAPSHOTS | {"tensor_parallel_size": 2, "speculative_config": drafts | by}
            for by in ({"method": "custom_class", "model": "tests.drafts:Bigrams"}, MTP)
        ),
        again=True,
    )
    for its in cut:
        same_answers(its, one)
        metrics = its["metrics"]
        drafted, accepted = (
            metrics[f"spec_decode_num_{name}"] for name in ("draft_tokens", "accepted_tokens")
        )
        # A random head is hardly ever right.
        assert accepted < drafted and (accepted > 0 or its is cut[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_prefixes_are_found(answered, name):
    metrics = answered[name]["metrics"]
    assert metrics["prefix_cache_hits"] > 0
    assert 0 < metrics["state_snapshots_used"] <= metrics["state_snapshots"] == 16
