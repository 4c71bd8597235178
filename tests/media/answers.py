"""How tests of images and videos take answers and compare them."""

from jaxllm import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3)
_ENDS = {"length", "stop"}  # not that a step has failed


def taken(outputs):
    """The tokens and logprobs of answers, which no failed step has ended."""
    found = [one for output in outputs for one in output.outputs]
    assert {one.finish_reason for one in found} <= _ENDS
    return [(one.token_ids, one.logprobs) for one in found]


def answers(llm, prompts, params=PARAMS):
    return taken(llm.generate(prompts, params, use_tqdm=False))


def each_alone(llm, prompts):
    """The answer to each prompt, alone and without anything cached."""
    found = []
    for one in prompts:
        assert llm.reset_prefix_cache()
        found += answers(llm, [one])
    return found


def assert_equal(found, expected):
    for (tokens, logprobs), (wanted, of_wanted) in zip(found, expected, strict=True):
        assert tokens == wanted
        for position, its in zip(logprobs, of_wanted, strict=True):
            for token, value in its.items():
                assert abs(position[token].logprob - value.logprob) < 1e-4


def before_marks(output, marks):
    """The tokens of an answer up to one that transformers would take for an image without
    pixels."""
    ((tokens, _),) = taken([output])
    places = [place for place, token in enumerate(tokens) if token in marks]
    return tokens[: min(places, default=len(tokens))]


def assert_as_logits(output, tokens, logits, bound=2e-3):
    """Compare a greedy answer's first tokens, and the logprobs of these and of the prompt, with a
    torch array of logits [tokens, vocabulary]."""
    expected = logits.log_softmax(-1).numpy()
    first = len(output.prompt_token_ids)
    assert len(output.prompt_logprobs) == first
    assert tokens == expected[first - 1 :].argmax(-1)[: len(tokens)].tolist()
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs[: len(tokens)]]
    assert len(found) <= len(expected)
    for position, its in zip(expected, found, strict=False):
        for token, value in its.items():
            assert abs(value.logprob - position[token]) < bound
