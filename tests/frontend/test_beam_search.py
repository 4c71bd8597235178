"""Beam search over toy models: wide beams against all sequences there are, narrow ones against a
search that looks at every continuation."""

import itertools

import numpy as np
import pytest

from jaxllm.errors import ValidationError
from jaxllm.frontend.beam_search import beam_search
from jaxllm.messages import EngineInfo
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.sampling_params import BeamSearchParams

VOCAB_SIZE, EOS = 4, 0
PROMPTS = [[1], [2, 3]]


def info(**changes):
    fields = {
        "model": "toy", "model_dir": "", "vocab_size": VOCAB_SIZE, "max_model_len": 16,
        "max_logprobs": 200, "eos_token_ids": [EOS], "max_num_seqs": 4,
        "max_num_batched_tokens": 16, "cache_groups": (), "block_size": 1,
    }  # fmt: skip
    return EngineInfo(**(fields | changes))


class Toy:
    """A random log p(next token | all before it), and the engine that knows it."""

    def __init__(self, seed=0):
        self.seed = seed

    def next_logprobs(self, tokens):
        logits = 2 * np.random.default_rng([self.seed, *tokens]).standard_normal(VOCAB_SIZE)
        return logits - np.log(np.exp(logits).sum())

    def generate(self, prompts, params):
        assert params.max_tokens == 1 and params.ignore_eos
        return [self.answer(prompt["prompt_token_ids"], params.logprobs) for prompt in prompts]

    def answer(self, tokens, num_logprobs):
        row = self.next_logprobs(tokens)
        best = np.argsort(-row)[:num_logprobs].tolist()
        logprobs = {token: Logprob(row[token]) for token in best}
        answer = CompletionOutput(0, "", best[:1], logprobs=[logprobs], finish_reason="length")
        return RequestOutput("", None, tokens, None, [answer], finished=True)

    def logprob(self, tokens, start):
        return sum(self.next_logprobs(tokens[:i])[tokens[i]] for i in range(start, len(tokens)))

    def all_sequences(self, prompt, max_tokens, ends):
        """Every answer to a prompt, with its log probability, unordered."""
        for length in range(1, max_tokens + 1):
            for answer in itertools.product(range(VOCAB_SIZE), repeat=length):
                ended = answer[-1] in ends
                if ends.isdisjoint(answer[:-1]) and (ended or length == max_tokens):
                    tokens = [*prompt, *answer]
                    yield tokens, self.logprob(tokens, len(prompt)), ended


def search(toy, **params):
    salts = [None] * len(PROMPTS)
    return beam_search(PROMPTS, salts, BeamSearchParams(**params), info(), [EOS], toy.generate)


@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("include_stop", [True, False])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
def test_wide_beams_find_all_sequences_in_order(ignore_eos, include_stop, length_penalty):
    toy = Toy()
    outputs = search(
        toy,
        beam_width=100,
        max_tokens=3,
        ignore_eos=ignore_eos,
        include_stop_str_in_output=include_stop,
        length_penalty=length_penalty,
    )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = []
        for tokens, logprob, ended in toy.all_sequences(prompt, 3, set() if ignore_eos else {EOS}):
            length = len(tokens) - ended
            shown = tokens[:-1] if ended and not include_stop else tokens
            expected.append((logprob / length**length_penalty, shown, logprob, ended))
        expected.sort(key=lambda entry: entry[0], reverse=True)
        assert [s.tokens for s in output.sequences] == [e[1] for e in expected[:100]]
        assert [s.cum_logprob for s in output.sequences] == pytest.approx(
            [e[2] for e in expected[:100]]
        )
        for sequence, (_, _, _, ended) in zip(output.sequences, expected, strict=True):
            assert (sequence.finish_reason, sequence.stop_reason) == (
                ("stop", EOS) if ended else ("length", None)
            )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("beam_width", [1, 2])
def test_narrow_beams_keep_the_best_at_every_step(beam_width, seed):
    toy = Toy(seed)
    outputs = search(toy, beam_width=beam_width, max_tokens=5, ignore_eos=True)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        beams = [(0.0, prompt)]
        for _ in range(5):
            beams = sorted(
                (
                    (logprob + toy.next_logprobs(tokens)[token], [*tokens, token])
                    for logprob, tokens in beams
                    for token in range(VOCAB_SIZE)
                ),
                reverse=True,
            )[:beam_width]
        assert [s.tokens for s in output.sequences] == [tokens for _, tokens in beams]
        assert [s.cum_logprob for s in output.sequences] == pytest.approx([b[0] for b in beams])
        assert all(len(s.logprobs) == 5 for s in output.sequences)


def test_search_is_over_when_every_beam_has_ended():
    class Ends(Toy):
        def answer(self, tokens, num_logprobs):
            assert tokens in PROMPTS
            answer = CompletionOutput(0, "", [EOS], logprobs=[{EOS: Logprob(-0.1)}])
            return RequestOutput("", None, tokens, None, [answer], finished=True)

    outputs = search(Ends(), beam_width=2, max_tokens=10)
    assert [[s.tokens for s in output.sequences] for output in outputs] == [[p] for p in PROMPTS]


def test_a_limit_on_concurrency_changes_nothing_but_the_size_of_batches():
    toy, sizes = Toy(), []

    def generate(prompts, params):
        sizes.append(len(prompts))
        return toy.generate(prompts, params)

    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    salts = [None] * len(PROMPTS)
    limited = beam_search(
        PROMPTS, salts, params, info(), [EOS], generate, concurrency_limit=1,
        on_step=lambda: sizes.append("step"),
    )  # fmt: skip
    assert sizes == [1, "step", 2, "step", 2, "step"] * 2
    assert limited == search(toy, beam_width=2, max_tokens=3, ignore_eos=True)
    for bad in (0, "1", True):
        with pytest.raises(ValidationError, match="concurrency_limit="):
            beam_search(PROMPTS, salts, params, info(), [], generate, concurrency_limit=bad)


def test_what_the_engine_cannot_give_is_refused():
    toy = Toy()
    with pytest.raises(ValidationError, match="beam_width=3 needs 6.*max_logprobs=5"):
        beam_search(
            PROMPTS,
            [None] * len(PROMPTS),
            BeamSearchParams(beam_width=3, max_tokens=2),
            info(max_logprobs=5),
            [EOS],
            toy.generate,
        )
    with pytest.raises(ValidationError, match="max_tokens=15 with a 2-token prompt"):
        search(toy, beam_width=2, max_tokens=15)
