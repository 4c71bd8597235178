"""Simulated time against times worked out by hand, and simulated steps against an engine's."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm import LLM, SamplingParams
from jaxllm.engine.pace import LOOK_S
from jaxllm.simulation.autoscaling import Autoscaler, AutoscalingRules
from jaxllm.simulation.mover import HostMemory
from jaxllm.simulation.simulator import simulate
from jaxllm.simulation.trace import Trace, make_trace
from jaxllm.testing import make_tiny_checkpoint


def trace_of(*requests, pieces=None):
    """Requests as (arrival, prompt tokens, output tokens)."""
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Trace(
        arrivals=np.array(arrivals, float),
        num_prompt_tokens=np.array(prompts, np.int32),
        num_output_tokens=np.array(outputs, np.int32),
        pieces=pieces,
    )


def test_one_request_takes_a_step_for_each_token(deployment):
    outcome = simulate(trace_of((5.0, 10, 4)), deployment(), 1)
    assert outcome.first_token_at.tolist() == [6.0]
    assert outcome.finished_at.tolist() == [9.0]
    assert outcome.busy_share == pytest.approx(4 / 9)


def test_a_prompt_above_the_budget_takes_several_steps(deployment):
    outcome = simulate(trace_of((0.0, 150, 1)), deployment(), 1)
    assert outcome.finished_at.tolist() == [3.0]  # 64 + 64 + 22 tokens


def test_with_overlap_the_host_is_hidden_and_without_it_is_not(deployment):
    trace = trace_of((0.0, 10, 10))
    hidden = simulate(trace, deployment(host_s=0.5), 1)
    plain = simulate(trace, deployment(host_s=0.5), 1, async_scheduling=False)
    # Half of the host's time before the first step, half after the last.
    assert hidden.finished_at.tolist() == [10.5]
    assert plain.finished_at.tolist() == [15.0]


def test_a_slow_host_sets_the_pace(deployment):
    outcome = simulate(trace_of((0.0, 10, 100)), deployment(host_s=3.0), 1)
    assert 3.0 <= outcome.end / 100 < 3.1


def test_requests_share_steps_up_to_the_seats_and_then_wait(deployment):
    outcome = simulate(trace_of(*[(0.0, 10, 8)] * 5), deployment(), 1)
    assert outcome.finished_at[:4].tolist() == [8.0] * 4
    # Planned at 7, while the last step of the others runs; it is found out then that they end.
    assert outcome.finished_at[4] >= 16.0


@pytest.mark.parametrize("at, first_token_at", [(4.7, 6.0), (4.8, 7.0)])
def test_who_comes_during_a_step_is_in_the_next_unless_it_is_planned(
    at, first_token_at, deployment
):
    outcome = simulate(trace_of((0.0, 10, 20), (at, 10, 2)), deployment(), 1)
    # The step from 5 to 6 is planned when that from 4 to 5 has a quarter left.
    assert outcome.first_token_at[1] == first_token_at
    assert outcome.finished_at[0] == 20.0


def test_who_comes_first_keeps_no_others_out(deployment):
    outcome = simulate(trace_of((0.0, 10, 20), (4.2, 10, 2), (4.6, 10, 2)), deployment(), 1)
    assert outcome.first_token_at[1:].tolist() == [6.0, 6.0]


@pytest.mark.parametrize("host_s", [0.1, 0.6, 0.9])
def test_no_step_is_planned_too_late(host_s, deployment):
    outcome = simulate(trace_of((0.0, 10, 40), (7.3, 10, 20)), deployment(host_s=host_s), 1)
    assert outcome.finished_at[0] == pytest.approx(40 + host_s)


class ShorterLater:
    """Ten steps of a second, and then of a tenth."""

    num_stages = 1

    def seconds(self, bucket, schedule):
        return [1.0 if schedule.step < 10 else 0.1]


def test_a_step_that_ends_sooner_than_expected_costs_no_more_than_a_look(deployment):
    replica = dataclasses.replace(deployment(), step_time=ShorterLater())
    outcome = simulate(trace_of((0.0, 10, 20)), replica, 1)
    assert 11.0 <= outcome.finished_at[0] <= 11.0 + LOOK_S


def test_two_replicas_serve_twice_as_much(deployment):
    trace = trace_of(*[(0.0, 10, 8)] * 8)
    assert simulate(trace, deployment(), 2).end == 8.0
    assert simulate(trace, deployment(), 1).end >= 16.0


def test_stages_of_a_pipeline_work_at_once(deployment):
    """Four requests in two lanes: a token of each takes two stages, both of which are busy."""
    trace = trace_of(*[(0.0, 10, 50)] * 4)
    outcome = simulate(trace, deployment(num_stages=2), 1)
    assert 100 <= outcome.end <= 104
    assert outcome.busy_share > 0.95


def test_what_is_shared_is_computed_once(deployment):
    replica = deployment(num_blocks=128)
    replica.info.max_model_len = 1024
    pieces = [(7,), (7,), (8,)]
    trace = trace_of((0.0, 520, 1), (100.0, 520, 1), (200.0, 520, 1), pieces=pieces)
    outcome = simulate(trace, replica, 1)
    took = (outcome.finished_at - trace.arrivals).tolist()
    assert took == [9.0, 1.0, 9.0]
    assert outcome.stats.prefix_cache_hits == 512
    without = simulate(trace, replica, 1, enable_prefix_caching=False)
    assert (without.finished_at - trace.arrivals).tolist() == [9.0] * 3


def test_a_prompt_that_leaves_no_room_is_refused_and_long_answers_are_cut(deployment):
    outcome = simulate(trace_of((0.0, 256, 1), (0.0, 250, 100)), deployment(), 1)
    assert math.isnan(outcome.finished_at[0]) and outcome.num_output_tokens.tolist() == [0, 6]


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it keeps nothing
)
@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.integers(1, 200), st.integers(1, 40)),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_everybody_is_served_in_order_of_time(deployment, requests, num_replicas, num_stages):
    trace = trace_of(*sorted(requests))
    outcome = simulate(trace, deployment(num_stages=num_stages), num_replicas)
    assert (outcome.first_token_at >= trace.arrivals + num_stages).all()
    assert (outcome.finished_at >= outcome.first_token_at).all()
    at_least = trace.arrivals + num_stages * outcome.num_output_tokens
    assert (outcome.finished_at >= at_least - 1e-6).all()
    assert outcome.stats.num_requests_finished == len(trace)
    assert outcome.stats.num_generation_tokens >= outcome.num_output_tokens.sum()


def test_steps_are_those_of_an_engine(tmp_path, deployment):
    """All at once, through an engine and through a simulation of it: the same steps."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    llm = LLM(
        make_tiny_checkpoint(tmp_path),
        block_size=16,
        num_gpu_blocks_override=24,
        enforce_eager=True,
        native_kernels=False,  # with them there are fewer programs than in the deployment
        **options,
    )
    trace = make_trace(
        12,
        requests_per_second=math.inf,
        burstiness=1,
        input_len=80,
        output_len=40,
        spread=0.2,
        num_prefixes=0,
        prefix_len=0,
        seed=3,
    )
    prompts = [[1 + i] * int(n) for i, n in enumerate(trace.num_prompt_tokens)]
    params = [
        SamplingParams(max_tokens=int(n), ignore_eos=True, temperature=0)
        for n in trace.num_output_tokens
    ]
    llm.generate(prompts, params, use_tqdm=False)
    real = llm.llm_engine.stats()
    stats = simulate(trace, deployment(num_blocks=24), 1).stats
    for name in (
        "num_steps", "num_scheduled_tokens", "num_token_rows", "num_preemptions",
        "num_generation_tokens", "step_sizes",
    ):  # fmt: skip
        assert getattr(stats, name) == getattr(real, name), name
    assert stats.num_preemptions > 0


def test_a_known_head_is_served_where_it_is_known(deployment):
    """Four heads on two replicas: by chance every second request finds its own."""
    replica = deployment(num_blocks=256)
    replica.info.max_model_len = 1024
    order = np.random.default_rng(0).integers(4, size=40).tolist()
    trace = trace_of(*((20.0 * i, 520, 1) for i in range(40)), pieces=[(head,) for head in order])
    rates = {
        policy: simulate(trace, replica, 2, routing_policy=policy).stats.prefix_cache_hit_rate
        for policy in ("prefix", "random")
    }
    assert rates["prefix"] == pytest.approx(36 / 40 * 512 / 520, abs=0.01)
    assert rates["random"] < rates["prefix"] - 0.05


def test_what_is_evicted_comes_back_from_the_host_in_the_time_of_the_bus(deployment):
    """The cache holds one of two heads. The first comes again."""
    trace = trace_of(*((40.0 * i, 520, 1) for i in range(3)), pieces=[(0,), (1,), (0,)])
    outcomes = []
    for num_places in (0, 256):
        replica = deployment(num_blocks=40)
        replica.info.max_model_len = 544
        (group,) = replica.info.cache_groups
        replica.info.cache_groups = (dataclasses.replace(group, max_blocks_per_request=34),)
        replica.info.host_places = (num_places,) if num_places else ()
        memory = HostMemory(num_places=(num_places,), seconds=(0.125,)) if num_places else None
        outcomes.append(simulate(trace, dataclasses.replace(replica, host_memory=memory), 1))
    without, with_host = outcomes
    took = with_host.finished_at - trace.arrivals
    assert (without.finished_at - trace.arrivals).tolist()[:2] == [9.0, 9.0]  # 520 tokens
    stats = with_host.stats
    assert stats.prefix_cache_hits == 512  # on the devices or on the host
    assert stats.host_blocks_loaded > 20
    assert took.tolist() == [9.0, 9.0, stats.host_blocks_loaded * 0.125 + 1]
    assert stats.external_cache_hit_rate == pytest.approx(
        stats.external_cache_hits / stats.external_cache_queries
    )
    assert without.stats.external_cache_hit_rate is None


def test_replicas_come_with_a_full_cache_and_few_requests(deployment):
    """Two requests that hold most of a cache are few for one replica, and want two by its cache."""
    found = {}
    for target in (None, 0.4):
        rules = AutoscalingRules(
            max_replicas=4, target_ongoing_requests=4, look_back_period_s=5, upscale_delay_s=2,
            target_kv_cache_usage=target,
        )  # fmt: skip
        trace = trace_of(*[(0.0, 96, 100)] * 2, (60.0, 10, 10))
        outcome = simulate(
            trace, deployment(num_blocks=32), 1, autoscaler=Autoscaler(rules), startup_s=5.0
        )
        found[target] = outcome.max_replicas
    assert found == {None: 1, 0.4: 2}


def test_replicas_come_with_requests_and_go_without(deployment):
    """16 requests of 100 s at once want four replicas of four; one request later wants one."""
    rules = AutoscalingRules(
        max_replicas=4, target_ongoing_requests=4, look_back_period_s=5, upscale_delay_s=2,
        downscale_delay_s=10,
    )  # fmt: skip
    trace = trace_of(*[(0.0, 10, 100)] * 4, *[(20.0, 10, 100)] * 12, (300.0, 10, 100))
    outcome = simulate(
        trace, deployment(), 1, autoscaler=Autoscaler(rules), startup_s=5.0, max_ongoing_requests=4
    )
    assert outcome.max_replicas == 4
    assert not np.isnan(outcome.finished_at).any()
    # Nobody waits for others to end, but all for the replicas: they are asked for when the mean
    # wants them, and have started 5 s later.
    assert outcome.first_token_at[4:-1].max() < 20 + 5 + 2 + 5 + 3
    # Later there is one again.
    fixed = simulate(trace, deployment(), 4)
    assert fixed.replica_seconds == 4 * fixed.end
    assert outcome.end < outcome.replica_seconds < 0.8 * fixed.replica_seconds
