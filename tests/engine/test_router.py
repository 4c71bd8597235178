import pytest

from jaxllm.engine.router import Router
from jaxllm.messages import EngineRequest
from jaxllm.sampling_params import SamplingParams


def request(name, prompt, max_tokens=10, **fields):
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        seed=0,
        **fields,
    )


def prompt(seed, length):
    return [(seed * 7919 + i) % 1000 for i in range(length)]


def test_requests_are_spread_by_the_tokens_that_they_may_take():
    router = Router(3)
    assert [router.choose(request(str(i), prompt(i, 20))) for i in range(3)] == [0, 1, 2]
    assert router.choose(request("long", prompt(9, 500), max_tokens=500)) == 0
    assert [router.choose(request(f"b{i}", prompt(20 + i, 20))) for i in range(2)] == [1, 2]


def test_work_that_has_ended_counts_no_more():
    router = Router(2)
    assert router.choose(request("a", prompt(1, 100))) == 0
    router.forget("a")
    router.forget("a")
    assert router.replica_of("a") is None
    assert router.choose(request("b", prompt(2, 10))) == 0


def test_a_known_head_brings_a_request_to_who_has_it():
    router = Router(2)
    head = prompt(1, 256)
    router.choose(request("a", [*head, 1]))
    router.choose(request("b", prompt(2, 300)))
    router.forget("a")
    router.forget("b")
    assert router.choose(request("c", prompt(3, 100))) == 0
    # Replica 0 has 110 tokens to do, but spares 256.
    assert router.choose(request("d", [*head, 2])) == 0
    # Now it has too many.
    assert router.choose(request("e", [*head, 3])) == 1


def test_a_salt_hides_a_head():
    router = Router(2)
    router.choose(request("a", prompt(1, 640), cache_salt="x"))
    assert router.choose(request("b", prompt(1, 640))) == 1


def test_samples_go_where_the_first_one_is():
    router = Router(2)
    first = router.choose(request("0", prompt(1, 30)))
    assert router.choose(request("1", prompt(1, 30), prefix_leader_id="0")) == first
    assert router.choose(request("2", prompt(1, 30), prefix_leader_id="0")) == first


@pytest.mark.parametrize("length", [0, 63, 64, 65, 200])
def test_any_length_of_prompt_is_served(length):
    router = Router(2)
    assert router.choose(request("a", prompt(1, length))) == 0
