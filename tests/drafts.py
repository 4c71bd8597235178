"""A drafter that is told what to draft, so that drafts are right, wrong, or some of each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.runner.model_runner import ModelRunner
from jaxllm.speculation.drafter import NO_DRAFT
from jaxllm.speculation.drafters import DRAFTERS

# Whether the draft of a place is wrong.
RIGHT = lambda place: False  # noqa: E731
WRONG = lambda place: True  # noqa: E731
MIXED = lambda place: place % 5 in (0, 3)  # noqa: E731


class Told:
    """Its state is i32 [S, max_model_len]: the text that it drafts from, then NO_DRAFT."""

    def abstract(self, num_slots, max_model_len):
        return jax.ShapeDtypeStruct((num_slots, max_model_len), jnp.int32)

    def admit(self, state, slot, tokens):
        return state.at[slot].set(tokens)

    def record(self, state, tokens, num_tokens, slots, ends):
        return state

    def propose(self, state, num_drafts, slots, ends):
        places = ends[:, None] + jnp.arange(num_drafts)
        return state.at[slots[:, None], places].get(mode="fill", fill_value=NO_DRAFT)


class Bigrams:
    """Drafts what followed each token the last time in any answer: some of an answer that repeats
    an earlier one. For `custom_class`, and so for processes of their own. Its state is the texts,
    and in its first slot what follows each token."""

    def __init__(self, speculation):
        pass

    def abstract(self, num_slots, max_model_len):
        return tuple(jax.ShapeDtypeStruct((num_slots, n), jnp.int32) for n in (max_model_len, 512))

    def admit(self, state, slot, tokens):
        texts, follows = state
        return texts.at[slot].set(tokens), follows

    def record(self, state, tokens, num_tokens, slots, ends):
        texts, follows = state
        index = jnp.arange(tokens.shape[1])
        is_new = index < num_tokens[:, None]
        places = jnp.where(is_new, (ends - num_tokens)[:, None] + index, texts.shape[1])
        texts = texts.at[slots[:, None], places].set(tokens, mode="drop")
        before = texts.at[slots[:, None], places - 1].get(mode="fill", fill_value=0)
        return texts, follows.at[0, jnp.where(is_new, before, 512)].set(tokens, mode="drop")

    def propose(self, state, num_drafts, slots, ends):
        texts, follows = state
        drafts = [texts.at[slots, ends - 1].get(mode="fill", fill_value=0)]
        for _ in range(num_drafts):
            drafts.append(follows[0, drafts[-1]])
        return jnp.stack(drafts[1:], axis=1)


class Script:
    """What the drafter is told: the texts of requests, by their prompt and their seed."""

    def __init__(self) -> None:
        self._texts: dict[tuple[tuple[int, ...], int | None], np.ndarray] = {}

    def learn(
        self,
        prompt: Sequence[int],
        seed: int | None,
        answer: Sequence[int],
        is_wrong: Callable[[int], bool] = RIGHT,
    ) -> None:
        """Draft this answer, but another token where it is wrong. A greedy request has no seed."""
        tokens = [*prompt, *answer]
        text = [t + 1 if is_wrong(place) else t for place, t in enumerate(tokens)]
        self._texts[tuple(prompt), seed] = np.array(text, np.int32)

    def text(self, admission):
        seed = None if admission.sampling_params.is_greedy else admission.seed
        return self._texts.get((tuple(admission.prompt_token_ids), seed), np.zeros(0, np.int32))


@contextmanager
def told() -> Iterator[Script]:
    """Let the method 'ngram' of engines that are made here draft by a script."""
    script, admit = Script(), ModelRunner._admit_drafts

    def admit_drafts(runner, admission):
        if runner._plan.speculation.method != "ngram":
            admit(runner, admission)
            return
        text = script.text(admission)
        tokens = np.full(runner._plan.max_model_len, NO_DRAFT, np.int32)
        tokens[: len(text)] = text
        runner._stages[0].admit_drafts(admission.slot, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DRAFTERS, "ngram", lambda speculation: Told())
        patch.setattr(ModelRunner, "_admit_drafts", admit_drafts)
        yield script
