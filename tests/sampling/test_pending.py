"""Several places of one slot at once are sampled as one after the other."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxllm.sampling import row_params
from jaxllm.sampling.sampler import record_accepted, sample
from jaxllm.sampling.slot_state import MAX_COUNT, NO_TOKEN, PROMPT_BIT
from jaxllm.sampling_params import SamplingParams

VOCAB = 40
PLACES = 4
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "seeded": SamplingParams(temperature=1, top_k=12, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.7, frequency_penalty=0.8, presence_penalty=0.5
    ),
    "all": SamplingParams(
        temperature=0.8, frequency_penalty=1.5, repetition_penalty=0.6, logprobs=3,
        logit_bias={3: 2.0}, min_tokens=3, bad_words=["x"],
        allowed_token_ids=list(range(20)),
    ),
    "bad words": SamplingParams(temperature=0, bad_words=["x"]),
    "min_tokens": SamplingParams(temperature=0, min_tokens=2),
}  # fmt: skip


@functools.partial(jax.jit, static_argnames="layout")
def sample_places(logits, packed, slots, output_index, positions, state, pending, layout):
    return sample(
        logits,
        row_params.decode(packed),
        slots=slots,
        samples=jax.numpy.ones(PLACES, bool),
        output_index=output_index,
        positions=positions,
        state=state,
        num_logprobs=4,
        layout=layout,
        pending=pending,
    )


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("nearly_full", [False, True], ids=["", "nearly full counts"])
def test_places_are_sampled_as_one_after_the_other(driver, rng, name, nearly_full):
    params = PARAMS[name]
    # Few tokens are likely, so that sequences repeat and words are completed.
    for _ in range(12):
        logits = rng.normal(size=(PLACES, VOCAB)).astype(np.float32)
        logits[:, :4] += 3
        drivers = [driver(VOCAB, 3), driver(VOCAB, 3)]
        for one in drivers:
            one.admit(
                1,
                params,
                seed=5,
                prompt=[0, 1],
                output=[2, 3, 0],
                stop_ids=[0, 2],
                bad_words=[[1, 2], [0, 1, 3], [0, 1, 2, 3], [3, 3], [2]],
            )
            if nearly_full:
                counts = one.state.token_counts.at[1, :4].set(PROMPT_BIT | (MAX_COUNT - 1))
                one.state = dataclasses.replace(one.state, token_counts=counts)
        one, several = drivers
        wanted = [one.step(logits[[place]], [1]) for place in range(PLACES)]
        tokens = np.array([step.tokens[0] for step in wanted], np.int32)

        index = np.arange(PLACES)
        before = np.where(index[None] < index[:, None], tokens[None], NO_TOKEN)
        packed = np.repeat(several.columns[[1]], PLACES, axis=0)
        output = sample_places(
            logits,
            packed,
            np.full(PLACES, 1, np.int32),
            several.num_outputs[1] + index,
            several.lengths[1] + index,
            several.state,
            before.astype(np.int32),
            driver.layout,
        )
        assert np.asarray(output.tokens).tolist() == tokens.tolist()
        if params.logprobs is not None:
            for place, step in enumerate(wanted):
                mine = np.asarray(output.logprobs.logprobs[place])
                np.testing.assert_allclose(mine, step.logprobs.logprobs[0], rtol=1e-6)
        # Only the first two count.
        state = jax.jit(record_accepted, static_argnames="layout")(
            output.state,
            tokens[None],
            np.array([2], np.int32),
            np.array([1], np.int32),
            row_params.decode(several.columns[[1]]).flags,
            layout=driver.layout,
        )
        plain = driver(VOCAB, 3)
        plain.columns, plain.num_outputs = several.columns, several.num_outputs
        plain.lengths = several.lengths
        plain.state = jax.tree.map(jax.numpy.array, several.state)
        for place in range(2):
            plain.step(logits[[place]], [1])
        for mine, its in zip(jax.tree.leaves(state), jax.tree.leaves(plain.state), strict=True):
            np.testing.assert_array_equal(mine, its)
