import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.plan.buckets import Bucket
from jaxllm.prompt_logprobs.device import PromptLogprobs
from jaxllm.prompt_logprobs.slice import NO_TARGET
from jaxllm.runner.inputs import InputLayout, SlotTable
from jaxllm.sampling.layout import LAYOUTS
from jaxllm.scheduler.schedule import Schedule

K = 3
VOCAB_SIZE = 11
HIDDEN_SIZE = 5


class Head:
    """The end of a model, which notes how many rows its logits have been computed for."""

    def __init__(self):
        self.weight = jax.random.normal(jax.random.key(0), (HIDDEN_SIZE, VOCAB_SIZE))
        self.asked: list[int] = []

    def compute_logits(self, hidden):
        jax.debug.callback(lambda rows: self.asked.append(len(rows)), hidden[:, 0])
        return hidden @ self.weight


@pytest.fixture
def head():
    return Head()


def schedule_of(tokens: int, its=None) -> Schedule:
    one = np.ones(1, np.int32)
    return Schedule(
        step=0, num_decodes=0, slots=one, num_tokens=one * tokens, context_lens=one * tokens,
        starts=one * 0, samples=one > 0, token_ids=np.arange(tokens, dtype=np.int32),
        block_updates=np.zeros((0, 4), np.int32),
        slices={} if its is None else {"prompt_logprobs": its},
    )  # fmt: skip


def run(head, bucket, schedule, hidden):
    """What the feature leaves, of inputs that went through the buffer of a step."""
    feature = PromptLogprobs(K, LAYOUTS["cpu"])
    layout = InputLayout(
        bucket, num_slots=4, num_cache_groups=1, num_param_columns=1, features=[feature]
    )
    buffer = layout.pack(schedule, SlotTable(4, 1))

    def step(buffer):
        inputs = layout.unpack(buffer)
        return inputs, feature.compute(inputs.slices[feature.name], head, hidden)

    inputs, left = jax.tree.map(np.asarray, jax.jit(step)(buffer))
    jax.effects_barrier()
    return inputs.slices[feature.name], left


def mixed(num_tokens: int) -> Bucket:
    return Bucket(decode_only=False, num_tokens=num_tokens, num_rows=2, max_block_updates=2)


def hidden_states(num_tokens: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (num_tokens, HIDDEN_SIZE))


def slice_of(targets, wants_more):
    return {
        "targets": np.array(targets, np.int32),
        "wants_more": np.array(wants_more, np.int32),
        "spans": np.zeros((1, 3), np.int32),
    }


def test_targets_arrive_padded(head):
    schedule = schedule_of(4, slice_of([NO_TARGET, 7, 8, 9], 1))
    fields, _ = run(head, mixed(8), schedule, hidden_states(8))
    assert fields["targets"].tolist() == [NO_TARGET, 7, 8, 9] + [NO_TARGET] * 4
    assert fields["wants_more"] == 1


@pytest.mark.parametrize("wants_more", [0, 1])
@pytest.mark.parametrize("num_tokens", [8, 64, 150])  # less than a piece, one, several
def test_they_are_those_of_a_softmax(head, num_tokens, wants_more):
    hidden = hidden_states(num_tokens)
    targets = np.arange(num_tokens, dtype=np.int32) % VOCAB_SIZE
    targets[::3] = NO_TARGET
    schedule = schedule_of(num_tokens, slice_of(targets, wants_more))
    _, left = run(head, mixed(num_tokens), schedule, hidden)
    expected = np.asarray(jax.nn.log_softmax(hidden @ head.weight))
    wanted = np.flatnonzero(targets >= 0)
    assert left["token_ids"][wanted, 0].tolist() == targets[wanted].tolist()
    of_targets = expected[wanted, targets[wanted]]
    np.testing.assert_allclose(left["logprobs"][wanted, 0], of_targets, atol=1e-5)
    best = np.sort(expected, axis=1)[wanted, ::-1]
    columns = K if wants_more else 1
    np.testing.assert_allclose(
        left["logprobs"][wanted, 1 : 1 + columns], best[:, :columns], atol=1e-5
    )
    assert not left["token_ids"][:, 1 + columns :].any()
    better = (expected[wanted] > of_targets[:, None]).sum(axis=1)
    assert left["ranks"][wanted].tolist() == (1 + better).tolist()


def test_nothing_is_computed_where_nobody_asks(head):
    _, left = run(head, mixed(8), schedule_of(5), hidden_states(8))
    assert head.asked == []
    assert {name: array.shape for name, array in left.items()} == {
        "token_ids": (8, 1 + K), "logprobs": (8, 1 + K), "ranks": (8,), "normalisers": (8,),
    }  # fmt: skip
    assert not any(array.any() for array in left.values())


def test_logits_are_made_for_few_positions_at_a_time(head):
    schedule = schedule_of(150, slice_of([1] * 150, 0))
    run(head, mixed(150), schedule, hidden_states(150))
    assert head.asked == [64, 64, 64]


def test_decodes_have_none():
    bucket = Bucket(decode_only=True, num_tokens=4, num_rows=4, max_block_updates=4)
    assert PromptLogprobs(K, LAYOUTS["cpu"]).fields(bucket) == {}


def test_what_comes_back_is_the_same_whatever_is_wanted(head):
    """To the last bit, so that nobody's logprobs depend on his neighbours."""
    hidden, targets = hidden_states(8), [2] * 8
    _, few = run(head, mixed(8), schedule_of(8, slice_of(targets, 0)), hidden)
    _, more = run(head, mixed(8), schedule_of(8, slice_of(targets, 1)), hidden)
    for name in ("ranks", "normalisers"):
        np.testing.assert_array_equal(few[name], more[name])
    np.testing.assert_array_equal(few["logprobs"][:, :2], more["logprobs"][:, :2])
    assert jnp.any(more["logprobs"][:, 2:])
