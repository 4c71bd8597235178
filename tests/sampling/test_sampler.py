"""The whole sampler against a plain model of one request, in float64."""

import dataclasses
from dataclasses import dataclass, field

import jax
import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.sampling.layout import LAYOUTS
from jaxllm.sampling.logits_processor import LogitsProcessor
from jaxllm.sampling.slot_state import MAX_COUNT
from jaxllm.sampling_params import SamplingParams

VOCAB = 50
SLOTS = 8

# The layouts, and one that takes three rows at a time, of which some are computed twice.
OF_LAYOUTS = {**LAYOUTS, "few": dataclasses.replace(LAYOUTS["cpu"], max_rows=3)}


def of_layouts(*names):
    layouts = [OF_LAYOUTS.get(name, name) for name in names]
    return pytest.mark.parametrize("driver", layouts, ids=names, indirect=True)


class MasksAll(LogitsProcessor):
    def encode(self, params):
        return () if params.extra_args else None

    def apply(self, logits, params, output_index):
        return logits - np.inf


class MakesNaN(LogitsProcessor):
    def encode(self, params):
        return () if params.extra_args else None

    def apply(self, logits, params, output_index):
        return logits.at[:, 5].set(np.nan)


@dataclass
class Request:
    params: SamplingParams
    seed: int = 0
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)

    def admit(self, driver, slot):
        driver.admit(
            slot,
            self.params,
            seed=self.seed,
            prompt=self.prompt,
            output=self.output,
            stop_ids=self.stop_ids,
            bad_words=self.bad_words,
        )

    def adjusted(self, logits):
        """Logits before temperature, as the documentation of the parameters has them."""
        p, x = self.params, np.array(logits, np.float64)
        for token, bias in (p.logit_bias or {}).items():
            x[token] += bias
        if p.allowed_token_ids is not None:
            x[np.setdiff1d(np.arange(len(x)), p.allowed_token_ids)] = -np.inf
        for word in self.bad_words:
            if self.output[len(self.output) - len(word) + 1 :] == word[:-1]:
                x[word[-1]] = -np.inf
        if len(self.output) < p.min_tokens:
            x[self.stop_ids] = -np.inf
        for token in {*self.prompt, *self.output}:
            r = p.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        for token in set(self.output):
            x[token] -= p.frequency_penalty * self.output.count(token) + p.presence_penalty
        return x

    def probabilities(self, logits):
        p = self.params
        x = self.adjusted(logits) / p.temperature
        probs = np.exp(x - x.max())
        probs[probs < p.min_p] = 0
        if p.top_k > 0:
            probs[probs < np.sort(probs)[-p.top_k]] = 0
        best_first = np.argsort(-probs)
        before = np.cumsum(probs[best_first]) - probs[best_first]
        probs[best_first[before >= p.top_p * probs.sum()]] = 0
        return probs / probs.sum()


def requests(rng, **fields):
    """One request for each slot, each with other values for all that changes the logits."""
    made = []
    for slot in range(SLOTS):
        ids = [int(i) for i in rng.permutation(VOCAB)]
        output = [int(i) for i in rng.integers(0, VOCAB, 6)]
        params = SamplingParams(
            **fields,
            max_tokens=100,
            presence_penalty=rng.uniform(-2, 2),
            frequency_penalty=rng.uniform(-2, 2),
            repetition_penalty=rng.uniform(0.5, 2),
            min_tokens=int(rng.integers(0, 12)),
            logit_bias=dict(zip(ids[:5], rng.uniform(-5, 5, 5).tolist(), strict=True)),
            allowed_token_ids=ids[3:40] if slot % 2 else None,
            bad_words=["a"],
        )
        made.append(
            Request(
                params,
                seed=slot,
                prompt=[int(i) for i in rng.integers(0, VOCAB, 5)],
                output=output,
                stop_ids=ids[10:13],
                bad_words=[[ids[14]], [output[-1], ids[15]], [output[-2], output[-1], ids[16]]],
            )
        )
    return made


@of_layouts("cpu", "tpu", "few", "native")
def test_greedy_rows_take_the_best_of_the_adjusted_logits(driver, rng):
    batch = requests(rng, temperature=0)
    sampler = driver(VOCAB, SLOTS)
    for slot, request in enumerate(batch):
        request.admit(sampler, slot)
    for _ in range(20):
        logits = rng.normal(0, 3, (SLOTS, VOCAB))
        tokens = sampler.step(logits, range(SLOTS)).tokens
        wanted = [r.adjusted(row).argmax() for r, row in zip(batch, logits, strict=True)]
        assert tokens.tolist() == wanted
        for request, token in zip(batch, tokens, strict=True):
            request.output.append(int(token))


@of_layouts("cpu", "tpu", "native")
def test_penalties_are_exact_where_counts_outgrow_their_table(driver):
    params = SamplingParams(temperature=0, frequency_penalty=0.001, repetition_penalty=1.5)
    # One short of the largest count, and one short of the largest after a whole round.
    long = Request(params, output=[3] * MAX_COUNT + [4] * (2 * MAX_COUNT + 1))
    sampler = driver(VOCAB, SLOTS)
    long.admit(sampler, 2)
    other = Request(params, output=[3])
    other.admit(sampler, 0)
    for token, rival in [(3, 5), (4, 6), (3, 7), (4, 8)]:
        logits = np.linspace(0, 1, VOCAB)
        logits[token] = 150.0
        penalised = long.adjusted(logits)[token]
        logits[rival] = penalised - 0.0005
        assert sampler.step([logits, logits], [2, 0]).tokens.tolist() == [token, token]
        long.output.append(token)
        # Now it has come once more, which makes the rival the better one.
        assert sampler.step([logits, logits], [2, 0]).tokens.tolist() == [rival, token]
        long.output.append(rival)


@of_layouts("cpu", "tpu", "few", "native")
def test_random_rows_follow_the_distribution_of_the_model(driver, rng):
    cuts = [
        {"temperature": 0.8},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 2.0, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
    ]
    sampler = driver(VOCAB, SLOTS)
    batch = [requests(rng, **fields)[slot] for slot, fields in enumerate(cuts)]
    logits = rng.normal(0, 2, (len(cuts), VOCAB))
    for slot, request in enumerate(batch):
        request.admit(sampler, slot)
    slots = np.arange(5120) % len(cuts)
    tokens = sampler.step(logits[slots], slots, positions=np.arange(5120, dtype=np.int32)).tokens
    for slot, request in enumerate(batch):
        probabilities = request.probabilities(logits[slot])
        possible = probabilities > 0
        counts = np.bincount(tokens[slots == slot], minlength=VOCAB)
        assert counts[~possible].sum() == 0
        # The statistic takes a few expected draws of each; what is rarer counts as one token.
        expected = probabilities * counts.sum()
        token = np.where(expected < 2, -1, np.arange(VOCAB)) + 1
        expected, counts = np.bincount(token, expected), np.bincount(token, counts)
        expected, counts = expected[expected > 0], counts[expected > 0]
        chi_square = ((counts - expected) ** 2 / expected).sum()
        freedom = len(expected) - 1
        assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom), cuts[slot]


def test_a_row_alone_gets_what_it_gets_in_a_crowd(driver, rng):
    batch = requests(rng, temperature=1.0, top_p=0.9)
    for request in batch[::3]:
        request.params = SamplingParams(temperature=0)
    batch[1].params = SamplingParams(temperature=0.7, top_k=9)
    logits = rng.normal(0, 3, (6, SLOTS, VOCAB))
    crowd = driver(VOCAB, SLOTS)
    for slot, request in enumerate(batch):
        request.admit(crowd, slot)
    together = np.stack([crowd.step(step, range(SLOTS)).tokens for step in logits])
    for slot, request in enumerate(batch):
        alone = driver(VOCAB, SLOTS)
        request.admit(alone, 7 - slot)  # another slot, another row, a smaller bucket
        tokens = [
            alone.step(step[slot : slot + 1], [7 - slot], num_rows=2).tokens[0] for step in logits
        ]
        assert tokens == together[:, slot].tolist()


@of_layouts("cpu")
def test_every_layout_chooses_the_same(driver, rng):
    """Also in vocabularies that are no number of blocks, and whatever rows are computed with. What
    the native sampler chooses is in test_native.py."""
    width = 1000
    logits = rng.normal(0, 3, (4, SLOTS, width)).astype(np.float32)

    def choices(layout, slots):
        sampler = driver(width, SLOTS)
        sampler.layout = layout
        for slot, request in enumerate(requests(np.random.default_rng(1), temperature=1.0)):
            if slot % 3 == 1:
                request.params = SamplingParams(temperature=0, logprobs=slot % 2)
            if slot % 3 == 2:
                request.params = SamplingParams(temperature=0.7, top_p=0.9, logprobs=3)
            request.admit(sampler, slot)
        steps = [sampler.step(step[slots], slots) for step in logits]
        return np.stack([step.tokens for step in steps]), steps[-1].logprobs

    tokens, logprobs = choices(LAYOUTS["cpu"], np.arange(SLOTS))
    for name, layout in OF_LAYOUTS.items():
        same, likewise = choices(layout, np.arange(SLOTS))
        np.testing.assert_array_equal(same, tokens, name)
        np.testing.assert_array_equal(likewise.token_ids, logprobs.token_ids, name)
        np.testing.assert_allclose(likewise.logprobs, logprobs.logprobs, atol=1e-5)
        fewer, _ = choices(layout, np.arange(5))
        np.testing.assert_array_equal(fewer, tokens[:, :5], name)


def test_padding_rows_leave_all_state_alone(driver, rng):
    batch = requests(rng, temperature=1.0)
    sampler = driver(VOCAB, SLOTS)
    for slot, request in enumerate(batch):
        request.admit(sampler, slot)
    before = jax.tree.map(np.asarray, jax.tree.leaves(sampler.state))
    sampler.step(rng.normal(0, 3, (1, VOCAB)), [3], num_rows=SLOTS)
    for old, new in zip(before, jax.tree.leaves(sampler.state), strict=True):
        np.testing.assert_array_equal(np.delete(new, 3, axis=0), np.delete(old, 3, axis=0))


def test_a_row_that_does_not_sample_counts_nothing(driver, rng):
    (request, other, *_) = requests(rng, temperature=0)
    sampler = driver(VOCAB, SLOTS)
    request.admit(sampler, 0)
    other.admit(sampler, 1)
    before = np.asarray(sampler.state.token_counts), np.asarray(sampler.state.recent_tokens)
    logits = rng.normal(0, 3, (SLOTS, VOCAB))
    sampler.step(logits[:2], [0, 1], num_rows=SLOTS, samples=[False, True])
    np.testing.assert_array_equal(sampler.state.token_counts[0], before[0][0])
    np.testing.assert_array_equal(sampler.state.recent_tokens[0], before[1][0])
    token = sampler.step(logits[:1], [0], num_rows=SLOTS).tokens[0]
    assert token == request.adjusted(logits[0]).argmax()


def test_a_plain_request_does_not_see_the_former_owner_of_its_slot(driver, rng):
    batch = requests(rng, temperature=0)
    sampler = driver(VOCAB, SLOTS)
    for slot, request in enumerate(batch):
        request.admit(sampler, slot)
    sampler.step(rng.normal(0, 3, (SLOTS, VOCAB)), range(SLOTS))
    sampler.admit(2, SamplingParams(temperature=0))
    # One that uses only some of the state, beside others that use all of it.
    sampler.admit(3, SamplingParams(temperature=0, logit_bias={1: 100.0}))
    logits = rng.normal(0, 3, (SLOTS, VOCAB))
    for _ in range(3):
        tokens = sampler.step(logits, range(SLOTS)).tokens
        assert tokens[2] == logits[2].argmax()
        assert tokens[3] == 1


def test_a_resumed_request_goes_on_as_if_it_had_stayed(driver, rng):
    batch = requests(rng, temperature=1.0, top_k=20)
    stayed, resumed = driver(VOCAB, SLOTS), driver(VOCAB, SLOTS)
    for slot, request in enumerate(batch):
        request.admit(stayed, slot)
    logits = rng.normal(0, 3, (8, SLOTS, VOCAB))
    tokens = np.stack([stayed.step(step, range(SLOTS)).tokens for step in logits])
    for slot, request in enumerate(batch):
        request.output += tokens[:4, slot].tolist()
        request.admit(resumed, (slot + 3) % SLOTS)
    order = (np.arange(SLOTS) + 3) % SLOTS
    again = np.stack([resumed.step(step, order).tokens for step in logits[4:]])
    np.testing.assert_array_equal(again, tokens[4:])


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16])
def test_a_bad_word_of_any_length_is_never_completed(driver, length):
    word = list(range(10, 10 + length))
    sampler = driver(VOCAB, SLOTS)
    params = SamplingParams(temperature=0, bad_words=["word"], max_tokens=100)
    # The prompt ends with the word's beginning: only output counts.
    sampler.admit(0, params, prompt=word[:-1] or [0], bad_words=[word])
    tokens = []
    for step in range(2 * length):
        logits = np.zeros((1, VOCAB))
        logits[0, word[step % length]] = 2
        logits[0, 5] = 1
        tokens.append(int(sampler.step(logits, [0], num_rows=SLOTS).tokens[0]))
    assert tokens == [*word[:-1], 5] * 2


def test_min_tokens_hold_back_the_stop_ids_and_then_let_them_go(driver):
    sampler = driver(VOCAB, SLOTS)
    sampler.admit(0, SamplingParams(temperature=0, min_tokens=3), stop_ids=[7, 8])
    logits = np.zeros((1, VOCAB))
    logits[0, [7, 8, 9]] = 3, 2, 1
    tokens = [int(sampler.step(logits, [0], num_rows=SLOTS).tokens[0]) for _ in range(5)]
    assert tokens == [9, 9, 9, 7, 7]


def test_a_row_with_every_token_masked_keeps_to_its_allowed_ids(driver, rng):
    sampler = driver(VOCAB, SLOTS)
    bad_words = [[4, 4], [4, 5], [5, 4], [5, 5]]
    for slot, temperature in enumerate((0.0, 1.0)):
        params = SamplingParams(
            temperature=temperature, top_k=1, allowed_token_ids=[4, 5], bad_words=["x"]
        )
        sampler.admit(slot, params, bad_words=bad_words)
    logits = rng.normal(0, 3, (2, VOCAB))
    logits[:, 4] = logits[:, 5] + 1
    tokens = [sampler.step(logits, [0, 1], num_rows=SLOTS).tokens.tolist() for _ in range(3)]
    assert tokens == [[4, 4]] * 3


@of_layouts("cpu")
def test_a_processor_that_masks_all_does_not_let_other_tokens_in(driver, rng):
    sampler = driver(VOCAB, SLOTS, (MasksAll(EngineConfig.create("m")),))
    sampler.admit(0, SamplingParams(temperature=0, allowed_token_ids=[4], extra_args={"all": 1}))
    assert sampler.step(rng.normal(0, 3, (1, VOCAB)), [0], num_rows=SLOTS).tokens.tolist() == [4]


def test_a_bias_of_any_size_neither_overflows_nor_breaks_a_mask(driver, rng):
    sampler = driver(VOCAB, SLOTS)
    biases = {3: 1e300, 4: -1e300, 5: -3.4e38}
    for slot, allowed in enumerate((None, [4], [4, 5, 6])):
        params = SamplingParams(temperature=0.5, logit_bias=biases, allowed_token_ids=allowed)
        sampler.admit(slot, params)
    logits = rng.normal(0, 3, (3, VOCAB))
    assert sampler.step(logits, range(3), num_rows=SLOTS).tokens.tolist() == [3, 4, 6]


@of_layouts("cpu", "tpu", "few", "native")
def test_logprobs_are_those_of_the_logits_as_they_came(driver, rng):
    sampler = driver(VOCAB, SLOTS)
    for slot in range(SLOTS):
        sampler.admit(
            slot,
            SamplingParams(
                temperature=slot / 4, top_k=3, logit_bias={slot: 100.0}, logprobs=slot % 3
            ),
        )
    logits = rng.normal(0, 3, (SLOTS, VOCAB)).astype(np.float32)
    tokens, _, _, logprobs = sampler.step(logits, range(SLOTS))
    assert tokens.tolist() == list(range(SLOTS))
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(logprobs.token_ids[:, 0], tokens)
    np.testing.assert_array_equal(logprobs.token_ids[:, 1], logits.argmax(axis=1))
    # XLA computes as many for all rows; the native sampler for each what it wants.
    columns = np.arange(logprobs.token_ids.shape[1])
    wanted = (columns <= np.arange(SLOTS)[:, None] % 3) | (driver.layout.op is None)
    expected = np.take_along_axis(exact, logprobs.token_ids, 1)
    np.testing.assert_allclose(logprobs.logprobs[wanted], expected[wanted], atol=1e-5)
    np.testing.assert_array_equal(
        logprobs.ranks, 1 + (logits > logits[range(SLOTS), tokens][:, None]).sum(axis=1)
    )


def test_logprobs_are_zeros_when_no_sampling_row_wants_them(driver, rng):
    sampler = driver(VOCAB, SLOTS)
    sampler.admit(0, SamplingParams(temperature=0, logprobs=2))
    sampler.admit(1, SamplingParams(temperature=0))
    logits = rng.normal(0, 3, (2, VOCAB))
    logprobs = sampler.step(logits, [0, 1], num_rows=SLOTS, samples=[False, True]).logprobs
    assert not any(np.any(part) for part in logprobs)


NO_NUMBERS = {
    "all are NaN": np.s_[:, np.nan],
    "one is NaN": np.s_[17, np.nan],
    "the last is NaN": np.s_[-1, np.nan],
    "one is infinite": np.s_[3, np.inf],
    "none is possible": np.s_[:, -np.inf],
}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1, seed=1),
        SamplingParams(temperature=1, top_k=5, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0, repetition_penalty=1.2, logit_bias={2: 1.0}, logprobs=2),
        SamplingParams(temperature=1, allowed_token_ids=[3, 17, 49]),
    ],
)
@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_logits_that_are_no_numbers_are_found_and_disturb_nobody(driver, rng, kind, params):
    logits = rng.normal(0, 3, (SLOTS, VOCAB)).astype(np.float32)
    damaged = logits.copy()
    place, value = NO_NUMBERS[kind]
    damaged[[1, 4], place] = value

    def step(logits):
        sampler = driver(VOCAB, SLOTS)
        for slot in range(SLOTS):
            # Beside rows that want the same, two that are greedy.
            sampler.admit(slot, params if slot < 6 else SamplingParams(temperature=0), seed=slot)
        return sampler.step(logits, range(SLOTS))

    expected, found = step(logits), step(damaged)
    healthy = np.delete(np.arange(SLOTS), [1, 4])
    assert expected.is_valid.all()
    assert np.flatnonzero(~found.is_valid).tolist() == [1, 4]
    np.testing.assert_array_equal(found.tokens[healthy], expected.tokens[healthy])
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_array_equal(one[healthy], other[healthy])


# XLA's own maximum drops some of these, and not others.
@of_layouts("cpu", "tpu", "native")
@pytest.mark.parametrize("width", [50, 128, 1000, 4099])
def test_nan_is_found_wherever_it_is(driver, rng, width):
    sampler = driver(width, SLOTS)
    sampler.admit(0, SamplingParams(temperature=0))
    for place in {0, 1, 49, 63, 127, 128, 130, 513, 998, 4095, 4098} & set(range(width)):
        logits = rng.normal(0, 3, (1, width))
        logits[0, place] = np.nan
        assert not sampler.step(logits, [0], num_rows=SLOTS).is_valid[0], place


@of_layouts("cpu")
@pytest.mark.parametrize(
    ("processor", "is_valid"), [(MakesNaN, [False, True]), (MasksAll, [True, True])]
)
def test_nan_of_a_processor_is_found_and_a_mask_of_all_is_none(driver, rng, processor, is_valid):
    sampler = driver(VOCAB, SLOTS, (processor(EngineConfig.create("tiny")),))
    sampler.admit(0, SamplingParams(extra_args={"a": 1}, seed=1))
    sampler.admit(1, SamplingParams(seed=1))
    found = sampler.step(rng.normal(0, 3, (2, VOCAB)), [0, 1], num_rows=SLOTS)
    assert found.is_valid.tolist() == is_valid
