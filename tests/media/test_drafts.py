"""Drafts behind images: the answers are those without drafts, whatever the drafts are."""

import pytest

pytest.importorskip("PIL")

from jaxllm import LLM
from tests.drafts import MIXED, RIGHT, WRONG, told
from tests.media.answers import PARAMS, answers, assert_equal, taken
from tests.media.models import OPTIONS, make_model, make_qwen2_5, make_qwen3_5
from tests.media.test_qwen import MARK, PROMPTS

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "num_speculative_tokens_per_batch_size": [[1, 4, 3]],
}
SNAPSHOTS = {"mamba_block_size": 32, "num_state_snapshots": 16}
KINDS = {
    "mistral3": (make_model, {}, "[IMG]"),
    "qwen2.5": (make_qwen2_5, {}, MARK),
    "qwen3.5": (make_qwen3_5, SNAPSHOTS, MARK),
}
LONG = PARAMS.clone(max_tokens=30, ignore_eos=True)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_answer(kind, tmp_path):
    make, options, mark = KINDS[kind]
    model = make(tmp_path / "model")
    prompts = [one | {"prompt": one["prompt"].replace(MARK, mark)} for one in PROMPTS]
    plain = LLM(model, **OPTIONS, **options)
    outputs = plain.generate(prompts, LONG, use_tqdm=False)
    expected = taken(outputs)
    plain.shutdown()
    with told() as script:
        llm = LLM(model, **OPTIONS, **options, speculative_config=NGRAM)
        try:
            for is_wrong in (MIXED, RIGHT, WRONG):
                for output in outputs:
                    tokens = output.outputs[0].token_ids
                    script.learn(output.prompt_token_ids, None, tokens, is_wrong)
                before = llm.llm_engine.stats().num_accepted_tokens
                for _ in range(2):  # the second time from the prefix cache
                    assert_equal(answers(llm, prompts, LONG), expected)
                gained = llm.llm_engine.stats().num_accepted_tokens - before
                assert (gained == 0) == (is_wrong is WRONG)
        finally:
            llm.shutdown()
