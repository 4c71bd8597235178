"""Every family computes in bfloat16 on this processor, as XLA compiles it for users. Not every
processor has instructions for this type, and without them XLA has no way for some products."""

import math

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.models.registry import family_names
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY


@pytest.mark.sweep
@pytest.mark.parametrize("family", family_names())
def test_a_family_computes_in_bfloat16(family, tmp_path):
    options = {"dtype": "bfloat16", "max_model_len": 64, "native_kernels": False}
    llm = LLM(make_tiny_checkpoint(tmp_path, family), **TINY | options)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    for output in llm.generate([[*range(5, 26)], [3, 4]], params, use_tqdm=False):
        [answer] = output.outputs
        assert answer.finish_reason == "length" and len(answer.token_ids) == 6
        assert all(math.isfinite(its.logprob) for at in answer.logprobs for its in at.values())
