"""Tables with padded rows, as TPUs have them, in a whole engine."""

import numpy as np
from jaxllm_kernels.platform import TABLE_ROW_MULTIPLES

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], list(range(3, 45)))]
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=2)


def test_padding_changes_no_answer(tmp_path, monkeypatch):
    # Its embedding is its head, too, and it has a table of positions.
    model = str(make_tiny_checkpoint(tmp_path, "gpt2"))

    def run(options):
        answers = LLM(model, **options).generate(PROMPTS, PARAMS, use_tqdm=False)
        return [answer.outputs[0] for answer in answers]

    plain, plain_bytes = run(TINY), make_plan(EngineArgs(model=model, **TINY)).weights_bytes
    monkeypatch.setitem(TABLE_ROW_MULTIPLES, "cpu", 128)
    # The size of its cache tells stored programs apart: they know nothing of the change above.
    options = TINY | {"num_gpu_blocks_override": 61}
    assert make_plan(EngineArgs(model=model, **options)).weights_bytes > plain_bytes
    for padded, expected in zip(run(options), plain, strict=True):
        assert padded.token_ids == expected.token_ids
        of_both = [
            [its.logprob for at in a.logprobs for its in at.values()] for a in (padded, expected)
        ]
        np.testing.assert_allclose(*of_both, atol=1e-5)
