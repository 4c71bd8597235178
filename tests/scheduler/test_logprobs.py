import numpy as np
import pytest

from jaxllm.scheduler.logprobs import row_logprobs
from jaxllm.scheduler.schedule import LogprobArrays

ARRAYS = LogprobArrays(
    np.arange(12, dtype=np.int32).reshape(3, 4),
    -np.arange(12, dtype=np.float32).reshape(3, 4),
    np.array([5, 6, 7], np.int32),
    np.array([0.5, 1.5, 2.5], np.float32),
)


@pytest.mark.parametrize(("count", "width"), [(0, 1), (2, 3), (3, 4)])
def test_a_row_gives_the_token_and_as_many_best_ones_as_asked(count, width):
    entry = row_logprobs(ARRAYS, 1, count)
    assert entry.token_ids == [4, 5, 6, 7][:width]
    assert entry.logprobs == [-4.0, -5.0, -6.0, -7.0][:width]
    assert entry.rank == 6


def test_more_than_a_step_computes_is_made_of_logits():
    logits = np.zeros(40, np.float32)
    logits[[30, 7, 9, 4]] = [3, 2, 2, -1]
    logits[35:] = -np.inf  # padding
    entry = row_logprobs(ARRAYS, 1, 35, logits)
    rest = [token for token in range(35) if token not in (30, 7, 9, 4)]
    # Best first, and of equals the first, after the token that is there.
    assert entry.token_ids == [4, 30, 7, 9, *rest, 4]
    assert entry.logprobs[:4] == [-2.5, 1.5, 0.5, 0.5]
    assert row_logprobs(ARRAYS, 1, 21, logits).token_ids == entry.token_ids[:22]
    assert entry.rank == 6
