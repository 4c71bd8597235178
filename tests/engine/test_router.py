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
    router = Router(range(3))
    assert [router.choose(request(str(i), prompt(i, 20))) for i in range(3)] == [0, 1, 2]
    assert router.choose(request("long", prompt(9, 500), max_tokens=500)) == 0
    assert [router.choose(request(f"b{i}", prompt(20 + i, 20))) for i in range(2)] == [1, 2]


def test_work_that_has_ended_counts_no_more():
    router = Router(range(2))
    assert router.choose(request("a", prompt(1, 100))) == 0
    router.forget("a")
    router.forget("a")
    assert router.replica_of("a") is None
    assert router.choose(request("b", prompt(2, 10))) == 0


def test_a_known_head_brings_a_request_to_who_has_it():
    router = Router(range(2))
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
    router = Router(range(2))
    router.choose(request("a", prompt(1, 640), cache_salt="x"))
    assert router.choose(request("b", prompt(1, 640))) == 1


def test_samples_go_where_the_first_one_is():
    router = Router(range(2))
    first = router.choose(request("0", prompt(1, 30)))
    assert router.choose(request("1", prompt(1, 30), prefix_leader_id="0")) == first
    assert router.choose(request("2", prompt(1, 30), prefix_leader_id="0")) == first


@pytest.mark.parametrize("length", [0, 63, 64, 65, 200])
def test_any_length_of_prompt_is_served(length):
    router = Router(range(2))
    assert router.choose(request("a", prompt(1, length))) == 0


def test_replicas_may_come_and_go():
    router = Router(["a", "b"])
    head = prompt(1, 640)
    assert router.choose(request("1", head)) == "a"
    router.set_replicas(["b", "c"])
    router.forget("1")  # ends on a replica that is gone
    assert router.choose(request("2", [*head, 1])) == "b"
    assert router.choose(request("3", prompt(2, 640))) == "c"
    router.set_replicas(["a", "b", "c"])
    assert router.rank(request("4", prompt(3, 64))) == ["a", "c", "b"]


def test_a_replica_that_comes_back_has_the_work_of_its_requests_alone():
    router = Router(["a", "b"])
    assert router.choose(request("1", prompt(1, 640))) == "a"
    router.set_replicas(["b"])
    router.set_replicas(["a", "b"])
    assert router.choose(request("2", prompt(2, 640))) == "b"
    router.forget("1")
    router.forget("2")
    names = [router.choose(request(f"b{i}", prompt(i, 40))) for i in range(3, 7)]
    assert names == ["a", "b", "a", "b"]


def test_who_takes_a_request_in_place_of_the_chosen_one_has_the_work():
    router = Router(range(2))
    assert router.rank(request("1", prompt(1, 100))) == [0, 1]
    router.move("1", 1)
    router.move("unknown", 1)
    assert router.replica_of("1") == 1
    assert router.choose(request("2", prompt(2, 100))) == 0
    router.forget("1")
    assert router.choose(request("3", prompt(3, 10))) == 1


def test_answers_of_one_prompt_count_each():
    router = Router(range(2))
    assert router.choose(request("1", prompt(1, 10), max_tokens=50), num_answers=4) == 0
    assert [router.choose(request(f"b{i}", prompt(i, 10), max_tokens=90)) for i in (2, 3)] == [1, 1]


@pytest.mark.parametrize("policy", ["least_work", "random"])
def test_other_policies_know_no_heads(policy):
    router = Router(range(2), policy)
    chosen = set()
    for i in range(20):
        chosen.add(router.choose(request(f"{i}", prompt(1, 640))))
        chosen.add(router.choose(request(f"other {i}", prompt(1, 640))))
        router.forget(f"{i}")
    assert chosen == {0, 1}
