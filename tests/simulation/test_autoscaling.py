"""The rule of Ray Serve, by hand and against Ray's own."""

import random
from typing import Any

import pytest

from jaxllm import ValidationError
from jaxllm.simulation.autoscaling import Autoscaler, AutoscalingRules

QUICK = {"target_ongoing_requests": 2, "upscale_delay_s": 3, "downscale_delay_s": 6}


def autoscaler(**rules):
    return Autoscaler(AutoscalingRules.read(QUICK | {"look_back_period_s": 1, **rules}))


def test_a_number_is_wanted_for_a_while_before_it_is_decided():
    scaler = autoscaler(max_replicas=9)
    scaler.note(0.0, 5)
    assert [scaler.decide(float(t), 1) for t in range(5)] == [1, 1, 1, 3, 3]
    scaler.note(4.0, 0)
    assert [scaler.decide(float(t), 3) for t in range(5, 13)] == [3, 3, 3, 3, 3, 3, 1, 1]


def test_the_mean_over_the_past_counts():
    scaler = autoscaler(max_replicas=9, look_back_period_s=10, upscale_delay_s=0)
    scaler.note(0.0, 2)
    scaler.note(8.0, 12)
    # 8 s with 2 requests, 2 s with 12.
    assert scaler.decide(10.0, 1) == 2
    assert scaler.decide(20.0, 2) == 6


def test_the_cache_that_requests_hold_counts_beside_their_number():
    scaler = autoscaler(max_replicas=9, upscale_delay_s=0, target_kv_cache_usage=0.5)
    scaler.note(0.0, 2)
    scaler.note_usage(1.0)  # one of two caches is full for a second
    assert scaler.decide(1.0, 2) == 2
    scaler.note_usage(1.9)
    assert scaler.decide(2.0, 2) == 4
    scaler.note(2.0, 20)
    scaler.note_usage(1.9)
    assert scaler.decide(3.0, 4) == 10 - 1  # as max_replicas allows


def test_bounds_hold():
    scaler = autoscaler(min_replicas=2, max_replicas=3, upscale_delay_s=0, downscale_delay_s=0)
    assert scaler.target == 2
    scaler.note(0.0, 100)
    assert scaler.decide(1.0, 2) == 3
    scaler.note(1.0, 0)
    assert scaler.decide(9.0, 3) == 2


@pytest.mark.parametrize(
    "rules, why",
    [
        ({"policy": "mine"}, "policy='mine': the simulated rule of Ray Serve has min_replicas"),
        ({"min_replicas": 0}, "min_replicas=0: at least 1 is simulated"),
        ({"min_replicas": 3, "max_replicas": 2}, "must be in this order"),
        ({"target_ongoing_requests": 0}, "target_ongoing_requests=0: it must be above 0"),
        ({"downscaling_factor": 0.0}, "downscaling_factor=0: it must be above 0"),
        ({"upscale_delay_s": -1}, "it must be at least 0"),
        ({"target_kv_cache_usage": 80.0}, "target_kv_cache_usage=80.0: it is a share of the cache"),
        ({"max_replicas": "many"}, "max_replicas='many' has type str"),
    ],
)
def test_other_rules_are_refused(rules, why):
    with pytest.raises(ValidationError, match=why):
        AutoscalingRules.read(rules)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(20))
def test_ray_decides_the_same(seed):
    pytest.importorskip("ray.serve")
    from ray.serve import autoscaling_policy
    from ray.serve._private.common import DeploymentID
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

    from jaxllm.server.ray.autoscaling import LoadPolicy

    chance = random.Random(seed)
    given: dict[str, Any] = QUICK | {
        "min_replicas": chance.randint(1, 2),
        "max_replicas": chance.randint(3, 9),
    }
    given |= {"upscaling_factor": chance.choice([0.3, 1.0])}
    given |= {"downscaling_factor": chance.choice([0.3, 1.0])}
    target_usage = chance.choice([None, 0.5])
    rules = AutoscalingRules.read(given | {"target_kv_cache_usage": target_usage})
    ours, config = Autoscaler(rules), AutoscalingConfig(**given)
    policy = autoscaling_policy.replica_queue_length_autoscaling_policy
    if target_usage is not None:
        policy = LoadPolicy(target_usage)
    target, state = ours.target, {}
    now = 0.0
    for _ in range(300):
        now += chance.choice([0.5, 1.0, 2.0])
        num = chance.choice([0, 0, 3, 10, 40])
        running = max(1, target - chance.randint(0, 1))
        usages = {place: chance.random() for place in range(running)}
        names = set(AutoscalingContext.__init__.__annotations__) - {"return"}
        context: Any = dict.fromkeys(names) | {
            "deployment_id": DeploymentID("d"), "current_num_replicas": running,
            "target_num_replicas": target, "config": config, "total_num_requests": num,
            "policy_state": state, "aggregated_metrics": {"kv_cache_usage": usages},
        }  # fmt: skip
        context = AutoscalingContext(**context)
        needed, _ = policy(context)
        wanted = autoscaling_policy._apply_scaling_factors(needed, running, config)
        target, state = autoscaling_policy._apply_delay_logic(
            max(0, wanted), target, config, state, now
        )
        target = min(max(target, config.min_replicas), config.max_replicas)
        assert ours._decided(now, running, num, sum(usages.values())) == target
