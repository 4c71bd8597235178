import pytest

from jaxllm.errors import ValidationError
from jaxllm.scheduler import policy
from jaxllm.scheduler.policy import get_scheduling_policy, register_scheduling_policy


class ShortestPromptFirst:
    def key(self, request):
        return (request.num_prompt_tokens,)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(policy, "_policies", dict(policy._policies))


def test_registered_policy_orders_requests(registry, make_engine, make_request):
    register_scheduling_policy("shortest_prompt", ShortestPromptFirst())
    engine = make_engine(policy=get_scheduling_policy("shortest_prompt"), max_num_seqs=1)
    for name, length in [("long", 20), ("short", 3), ("middle", 9), ("short2", 3)]:
        engine.add(make_request(name, length))
    engine.drain()
    order = [received.request.request_id for received in engine.done]
    assert order == ["short", "short2", "middle", "long"]


def test_unknown_policy_is_refused_with_the_known_names():
    with pytest.raises(ValidationError, match="'lifo' is unknown; use one of fcfs, priority"):
        get_scheduling_policy("lifo")


def test_a_name_is_registered_once(registry):
    first = ShortestPromptFirst()
    register_scheduling_policy("mine", first)
    register_scheduling_policy("mine", first)
    with pytest.raises(ValidationError, match="'mine' is already registered"):
        register_scheduling_policy("mine", ShortestPromptFirst())


def test_a_policy_needs_a_key(registry):
    with pytest.raises(ValidationError, match="no method key"):
        register_scheduling_policy("mine", object())  # type: ignore[arg-type]
