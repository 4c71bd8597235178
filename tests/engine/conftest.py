"""What it means that an engine answers as another one did."""

from collections import Counter

import pytest

from jaxllm import RequestOutputKind


@pytest.fixture(scope="session")
def assert_same_answer():
    return _assert_same_answer


@pytest.fixture(scope="session")
def assert_same():
    """Answers to the same requests are the same: to the token, and in their logprobs to `atol`."""

    def check(outputs, expected, atol=1e-5):
        assert len(outputs) == len(expected)
        for output, wanted in zip(outputs, expected, strict=True):
            assert len(output.outputs) == len(wanted.outputs)
            for answer, wanted_answer in zip(output.outputs, wanted.outputs, strict=True):
                _assert_same_answer(answer, wanted_answer, atol)

    return check


@pytest.fixture(scope="session")
def assert_streamed_is():
    """Requests that an engine streams, in deltas and cumulatively, end as they are expected to."""

    def check(expected, engine, prompts, params):
        kinds = [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE]
        for i, (ids, its_params) in enumerate(zip(prompts, params, strict=True)):
            for kind in kinds:
                engine.add_request(
                    f"{i}-{kind.name}",
                    {"prompt_token_ids": ids},
                    its_params.clone(output_kind=kind),
                )
        text, tokens, finished, num_pieces = _streamed(engine)
        for i, wanted in enumerate(expected):
            for kind in kinds:
                key = f"{i}-{kind.name}"
                assert text[key] == wanted.outputs[0].text
                assert tokens[key] == wanted.outputs[0].token_ids
                assert finished[key] == wanted.outputs[0].finish_reason
                # It came as it was made.
                assert num_pieces[key] > 1 or len(tokens[key]) == 1

    return check


def _assert_same_answer(answer, wanted, atol=1e-5):
    assert answer.token_ids == wanted.token_ids
    assert answer.text == wanted.text
    assert (answer.finish_reason, answer.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
    for position, (given, due) in enumerate(zip(answer.logprobs, wanted.logprobs, strict=True)):
        token = answer.token_ids[position]
        assert given[token].logprob == pytest.approx(due[token].logprob, abs=atol)
        assert sorted(x.logprob for x in given.values()) == pytest.approx(
            sorted(x.logprob for x in due.values()), abs=atol
        )


def _streamed(engine):
    text: dict[str, str] = {}
    tokens: dict[str, list[int]] = {}
    finished = {}
    num_pieces: Counter[str] = Counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            [answer] = output.outputs
            key = output.request_id
            num_pieces[key] += 1
            if key.endswith("DELTA"):
                text[key] = text.get(key, "") + answer.text
                tokens[key] = tokens.get(key, []) + list(answer.token_ids)
            else:
                assert answer.text.startswith(text.get(key, ""))
                text[key], tokens[key] = answer.text, list(answer.token_ids)
            if output.finished:
                assert key not in finished
                finished[key] = answer.finish_reason
    return text, tokens, finished, num_pieces
