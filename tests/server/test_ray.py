"""A fleet: frontends that answer with engines of replicas.

Always run: one engine, with what Ray does between it and a frontend replaced by calls, which may be
lost on the way. Run when asked for: a Ray cluster of three nodes (tests/server/fleet.py).
"""

import asyncio
import copy
import functools
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm import LLM, AsyncLLMEngine, RequestOutputKind, SamplingParams, ValidationError
from jaxllm.config import EngineArgs
from jaxllm.engine.commands import ResetPrefixCache
from jaxllm.errors import JaxLLMError
from jaxllm.messages import Outputs, Ready
from jaxllm.server.ray.models import read_models
from jaxllm.server.ray.options import read, typed
from jaxllm.server.ray.replica import EngineReplica
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

PROMPTS = ["Once upon a time", [5, 6, 7], "a b c d e f g " * 5]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=2),
    SamplingParams(seed=1, n=3, max_tokens=7, prompt_logprobs=1),
    SamplingParams(seed=3, max_tokens=20, stop=["e", "a"]),
]
ENDLESS = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
DELTAS = ENDLESS.clone(output_kind=RequestOutputKind.DELTA)
WHOLE = ENDLESS.clone(output_kind=RequestOutputKind.FINAL_ONLY)


@pytest.mark.parametrize(
    "arguments, why",
    [
        ({"port": 1}, "port=1: Ray Serve's proxy listens"),
        ({"api_server_count": 2}, "api_server_count=2: use num_frontends"),
        ({"response_store": "memory"}, "response_store='memory': frontends come and go"),
        ({"batch_dir": "d"}, "batch_dir='d': frontends come and go"),
        ({"admin_without_key": True}, "none that starts later"),
        ({"nnodes": "auto"}, "nnodes='auto': under Ray Serve say how many ranks"),
        ({"nnodes": 2, "master_port": 5}, "master_port=5: the replica starts the ranks of its"),
        ({"nnodes": 2, "placement_group_bundles": [{"CPU": 1}]}, "nnodes=2; give a bundle for ea"),
        ({"distributed_executor_backend": "ray"}, "backend='ray': the replica starts the ranks"),
        ({"num_replicas": 2, "autoscaling_config": {}}, "num_replicas=2: it and autoscaling_c"),
        ({"autoscaling_config": {"target_kv_cache_usage": 0}}, "cache_usage=0: it is a share of"),
        (
            {"autoscaling_config": {"target_kv_cache_usage": 0.5, "policy": {}}},
            "policy={}: target_kv_cache_usage has a policy of its own",
        ),
        ({"num_replicas": 0}, "num_replicas=0: it must be at least 1"),
        ({"routing_policy": "best"}, "routing_policy='best' is not one of 'prefix'"),
        ({"placement_group_strategy": "PACK"}, "='PACK': it needs placement_group_bundles"),
        ({"modell": "m"}, "unknown engine argument 'modell'"),
        ({"served_model_name": 3}, "served_model_name=3 has type int"),
    ],
)
def test_what_makes_no_fleet_is_refused(arguments, why):
    with pytest.raises(ValidationError, match=why):
        read({"model": "m", **arguments})


def test_engines_take_blocks_of_others_and_give_none(tmp_path):
    (tmp_path / "secret").write_text("s" * 64)
    secret = {"kv_offloading_size": 1, "kv_secret_file": str(tmp_path / "secret")}
    assert read({"model": "m", "kv_role": "kv_consumer", **secret}).config.hand_over.takes
    for role in ("kv_producer", "kv_both"):
        why = f"kv_role='{role}': an answer of a fleet cannot say which of its engines"
        with pytest.raises(ValidationError, match=why):
            read({"model": "m", "kv_role": role, **secret})


def test_each_rank_of_an_engine_has_a_bundle():
    actor = {"num_cpus": 0, "num_gpus": 8, "resources": {"rack": 1}}
    one = {"GPU": 8, "rack": 1}
    for options, bundles in (
        ({"ray_actor_options": actor}, [one] * 2),
        ({}, [{"CPU": 1}] * 2),
        ({"placement_group_bundles": [one, {"GPU": 8}]}, [one, {"GPU": 8}]),
    ):
        asked = read({"model": "m", "nnodes": 2, "tensor_parallel_size": 2, **options})
        assert asked.fleet.placement_group_bundles == bundles


def test_several_models_tell_the_widest_bounds():
    pytest.importorskip("ray.serve")
    from jaxllm.openai.schema import EngineBounds
    from jaxllm.server.openapi import widest

    some = [
        EngineBounds(vocab_size=10, max_model_len=5, takes_embeds=False, has_priorities=False),
        EngineBounds(vocab_size=20, max_model_len=3, takes_embeds=True, has_priorities=False),
    ]
    assert widest(some) == EngineBounds(vocab_size=20, max_model_len=5, has_priorities=False)


def test_ranks_on_a_tpu_slice_have_the_numbers_of_its_workers():
    pytest.importorskip("ray.serve")
    from jaxllm.server.ray.ranks import Place, in_order

    workers = [Place("a", one) for one in ("10", "2", "1")]
    assert in_order(Place("a", "0"), workers, [10, 2, 1]) == [1, 2, 10]
    assert in_order(Place("", ""), [Place("", "")] * 2, [1, 2]) == [1, 2]
    with pytest.raises(JaxLLMError, match="rank 0 of an engine is on worker 1 of the TPU slice"):
        in_order(Place("a", "1"), workers[:1], [1])
    with pytest.raises(JaxLLMError, match="the ranks of an engine are on several TPU slices"):
        in_order(Place("b", "0"), workers, [1, 2, 3])


A, B = {"model": "a", "lora_modules": ["x=/x"]}, {"model": "b", "served_model_name": ["c", "d"]}


@pytest.mark.parametrize(
    "options, why",
    [
        ({"models": []}, r"models=\[\]: give a list of models"),
        ({"models": ["a"]}, r"models\[0\]='a': it must be an object"),
        ({"models": [A, A]}, r"served_model_name='a': models\[0\] and \[1\] both have this name"),
        ({"models": [A, {"model": "x"}]}, r"served_model_name='x': models\[0\] and \[1\] both"),
        ({"models": [A, B | {"served_model_name": ["c", "c"]}]}, r"='c': models\[1\] both have"),
        ({"models": [A, B | {"modell": 1}]}, r"models\[1\]: unknown engine argument 'modell'"),
        ({"models": [A, B | {"num_replicas": 0}]}, r"models\[1\]: num_replicas=0: it must be"),
        ({"models": [A, B | {"api_key": ["k"]}]}, r"models\[1\].api_key=\['k'\]: it is for all"),
        ({"models": [A, B | {"models": [A]}]}, r"models\[1\].models=.* a model has none within"),
        ({"models": [A], "max_num_seqs": 4}, "max_num_seqs=4: beside models there are only"),
        ({"models": [A], "model": "a"}, "model='a': beside models there are only"),
        ({"models": [A], "port": 1}, "port=1: Ray Serve's proxy listens"),
        ({"models": [A], "num_frontends": 0}, "num_frontends=0: it must be at least 1"),
        ({"models": [A], "enable_tokenizer_info_endpoint": True}, "a request for it names no mo"),
        (
            {"models": [A | {"lora_resolver_dirs": ["/x"]}, B | {"lora_resolver_dirs": ["/x"]}]},
            "lora_resolver_dirs='/x': .* would both look up a name there",
        ),
    ],
)  # fmt: skip
def test_models_that_a_request_could_not_tell_apart_are_refused(options, why):
    with pytest.raises(ValidationError, match=why):
        read_models(options)


def test_each_of_several_models_has_its_own_options():
    scaling = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}
    asked = read_models(
        typed(
            {
                "models": json.dumps([A | {"max_num_seqs": 2}, B | scaling]),
                "api_key": "k", "num_frontends": "2",
            }
        )
    )  # fmt: skip
    a, b = asked.models
    assert (a.names, b.names) == (("a", "x"), ("c", "d"))
    assert (a.deployment, b.deployment) == ("Engine-a", "Engine-c")
    assert [one.asked.config.scheduler.max_num_seqs for one in asked.models] == [2, None]
    assert b.asked.fleet.autoscaling_config == scaling["autoscaling_config"]
    assert {one.asked.server.api_key for one in asked.models} == {("k",)}
    assert asked.fleet.num_frontends == 2


def test_options_of_a_model_among_several_are_read_as_those_of_one_alone():
    texts = {"model": "a", "served_model_name": "qwen", "max_model_len": "4096"}
    (several,) = read_models(typed({"models": [texts]})).models
    alone = read(typed(texts))
    assert several.names == alone.server.served_model_name == ("qwen",)
    assert several.asked.engine == alone.engine == {"model": "a", "max_model_len": 4096}
    with pytest.raises(ValidationError, match=r"models\[0\]='a': it must be an object"):
        read_models(typed({"models": ["a"]}))


def test_a_field_of_autoscaling_that_nobody_reads_is_refused():
    pytest.importorskip("ray.serve")
    from jaxllm.server.ray import build
    from jaxllm.server.ray.application import _scaling

    with pytest.raises(ValidationError, match="autoscaling_config.max_replica=3: its fields are"):
        build(model="m", autoscaling_config={"max_replica": 3})
    given = {"max_replicas": 3, "target_kv_cache_usage": None}
    assert _scaling(given) == {"max_replicas": 3}
    assert _scaling(given | {"target_kv_cache_usage": 0.5})["policy"]


def test_options_are_read_from_texts():
    asked = read(
        typed(
            {
                "model": "123", "max_model_len": "4096", "enforce_eager": "true",
                "served_model_name": "a", "num_replicas": "2", "request_timeout": "1.5",
                "ray_actor_options": '{"num_gpus": 1}', "api_key": '["k1", "k2"]', "max_batches": 3,
            }
        )
    )  # fmt: skip
    assert asked.engine == {"model": "123", "max_model_len": 4096, "enforce_eager": True}
    assert asked.server.served_model_name == ("a",)
    assert (asked.server.request_timeout, asked.server.max_batches) == (1.5, 3)
    assert asked.server.api_key == ("k1", "k2")
    assert (asked.fleet.num_replicas, asked.fleet.ray_actor_options) == (2, {"num_gpus": 1})
    with pytest.raises(ValidationError, match="max_model_len='long': write it as JSON"):
        typed({"max_model_len": "long"})


class Handle:
    """The replicas of a deployment, all of which are one. The first streams are lost: each after
    so many outputs, of a token each, as `losses` says."""

    def __init__(self, replica):
        self.replica, self.losses, self.num_streams = replica, [], 0
        self.is_slow = False  # to answer calls
        self.describe = SimpleNamespace(remote=replica.describe)

    def options(self, *, method_name, stream):
        assert (method_name, stream) == ("answer", True)
        return SimpleNamespace(remote=self._stream)

    def broadcast(self, name, *args):
        async def results_async(**how):
            while self.is_slow:
                await asyncio.sleep(0)
            return [await getattr(self.replica, name)(*args), RuntimeError("it is lost")]

        return SimpleNamespace(results_async=results_async)

    def _stream(self, work):
        self.num_streams += 1
        return _Stream(self.replica, work, self.losses.pop(0) if self.losses else None)


class _Stream:
    def __init__(self, replica, work, loss):
        self._outputs, self._loss = replica.answer(copy.copy(work)), loss

    async def __aiter__(self):
        from ray.exceptions import RaySystemError

        lost = RaySystemError("the actor died")
        if self._loss == 0:
            raise lost
        num = 0
        try:
            async for data in self._outputs:
                # A replica that is slow sends several at once.
                for output in msgspec.msgpack.decode(data, type=Outputs).outputs:
                    yield msgspec.msgpack.encode(Outputs([output]))
                    num += 1
                    if num == self._loss:
                        raise lost
        finally:
            await self._outputs.aclose()

    def cancel(self):
        asyncio.create_task(self._outputs.aclose())


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return TINY | {"model": str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))}


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def handle(options):
    pytest.importorskip("ray.serve")
    return Handle(EngineReplica(options, max_prompts=2))


class Frontend:
    """A frontend before the replicas. Called with prompts, it returns the outputs of each."""

    def __init__(self, options, loop, handle):
        from jaxllm.server.ray.fleet import Fleet

        self._loop, self._handle = loop, handle
        handle.num_streams = 0
        ready = msgspec.msgpack.decode(loop.run(handle.replica.describe()), type=Ready)
        self.engine = AsyncLLMEngine(EngineArgs(**options), Fleet(handle, ready, max_attempts=3))

    def __call__(self, prompts, params, losses=()):
        self._handle.losses = list(losses)
        return self._loop.run(asyncio.wait_for(self._all(prompts, params), 300))

    async def _all(self, prompts, params):
        names = map(str, range(len(prompts)))
        return await asyncio.gather(*map(self._outputs, prompts, params, names))

    async def _outputs(self, prompt, params, name):
        return [one async for one in self.engine.generate(prompt, params, name)]


@pytest.fixture
def ask(options, loop, handle):
    frontend = Frontend(options, loop, handle)
    yield frontend
    frontend.engine.shutdown()


def answers(output):
    return [(a.text, a.token_ids, a.finish_reason, a.stop_reason) for a in output.outputs]


async def running(engine):
    stats = await engine.stats()
    return stats.num_requests_running + stats.num_requests_waiting


async def until_idle(engine):
    while await running(engine):
        await asyncio.sleep(0.01)


def test_a_fleet_answers_as_an_engine_does(options, ask, loop):
    expected = LLM(**options).generate(PROMPTS, PARAMS, use_tqdm=False)
    found = ask(PROMPTS, PARAMS)
    assert [answers(one[-1]) for one in found] == [answers(one) for one in expected]
    assert found[1][-1].prompt_logprobs == expected[1].prompt_logprobs
    # The one with a stop string was aborted in the engine; others of a prompt would have gone on.
    some = PARAMS[2].clone(n=3, ignore_eos=True, max_tokens=90)
    assert len(ask([PROMPTS[0]], [some])[0][-1].outputs) == 3
    loop.run(asyncio.wait_for(until_idle(ask.engine), 300))
    with pytest.raises(ValidationError, match="it is for one engine, not for a fleet"):
        loop.run(ask.engine.call(ResetPrefixCache()))


def test_what_was_not_begun_is_tried_elsewhere(ask, handle):
    (found,) = ask(["Hi"], [DELTAS])
    whole = "".join(one.outputs[0].text for one in found)
    (again,) = ask(["Hi"], [DELTAS], losses=[0, 0])
    assert "".join(one.outputs[0].text for one in again) == whole
    assert again[-1].outputs[0].finish_reason == "length"
    assert handle.num_streams == 1 + 3
    # Of an answer that is sent as a whole nothing is sent before its end.
    ((last,),) = ask(["Hi"], [WHOLE], losses=[0])
    assert (last.outputs[0].text, last.outputs[0].finish_reason) == (whole, "length")


def test_what_was_begun_ends_with_the_reason(ask, handle):
    ((*_, whole),) = ask(["Hi"], [ENDLESS])
    (found,) = ask(["Hi"], [DELTAS], losses=[3])
    last = found[-1].outputs[0]
    assert last.finish_reason == "error"
    text = "".join(one.outputs[0].text for one in found)
    assert text and whole.outputs[0].text.startswith(text) and text != whole.outputs[0].text
    assert handle.num_streams == 2
    (found,) = ask(["Hi"], [DELTAS], losses=[0, 0, 0])
    assert found[-1].outputs[0].finish_reason == "error"
    assert [one.outputs[0].text for one in found] == [""]
    assert handle.num_streams == 2 + 3


def test_an_abort_reaches_the_engine(ask, loop):
    many = DELTAS.clone(n=100, temperature=1)  # of which four run at once: 10,000 tokens

    async def leave():
        async for _ in ask.engine.generate("Hi", many, "left"):
            break
        generator = ask.engine.generate("Hi", many, "aborted")
        await anext(generator)
        await ask.engine.abort("aborted")
        rest = [one async for one in generator]
        assert "abort" in {one.finish_reason for part in rest for one in part.outputs}
        await until_idle(ask.engine)
        return (await ask.engine.stats()).num_generation_tokens

    before = loop.run(ask.engine.stats()).num_generation_tokens
    assert loop.run(asyncio.wait_for(leave(), 300)) - before < 10_000


def test_a_slow_replica_delays_no_figures(ask, loop, handle, monkeypatch):
    pytest.importorskip("ray.serve")

    async def read():
        before = await ask.engine.stats()
        handle.is_slow = True
        with monkeypatch.context() as impatient:
            impatient.setattr("jaxllm.server.ray.fleet._PATIENCE_S", 0.01)
            assert [await ask.engine.stats() for _ in range(2)] == [before] * 2
        handle.is_slow = False
        fleet = ask.engine._client
        await asyncio.wait(fleet._asked.values())
        assert not fleet._asked
        await asyncio.wait_for(ask.engine.stats(), 30)

    loop.run(asyncio.wait_for(read(), 60))


def test_a_request_finds_its_model_among_several(options, loop, handle, monkeypatch):
    pytest.importorskip("ray.serve")
    monkeypatch.setattr("jaxllm.server.ray.ingress._PATIENCE_S", 0.0)
    from jaxllm.server.auth import read_keys
    from jaxllm.server.ray.frontend import service_of
    from jaxllm.server.ray.ingress import HostedModel, Models

    entries = [options | {"served_model_name": [*names]} for names in ("ab", "c", "d")]
    asked = read_models({"models": entries, "api_key": ["key"], "disable_log_stats": True})
    keys = read_keys(asked.server)

    async def make(model):
        if model.names == ("d",):
            await asyncio.Event().wait()  # it never starts
        return await service_of(handle, model.asked, has_own_seed=False)

    async def ask_all():
        hosted = [HostedModel(one, functools.partial(make, one), keys) for one in asked.models]
        models = Models(hosted, asked.server, keys)
        await models.start()
        while not all(one.service for one in hosted[:2]):
            await asyncio.sleep(0.01)
        app = models.app()
        async with app.router.lifespan_context(app), client_of(app) as client:
            found = {}
            for name in ("a", "b", "c", "d", "e", None, 5):
                body = {"prompt": "Hi", "max_tokens": 2, "model": name}
                found[name] = await client.post("/v1/completions", json=body)
            found["anthropic"] = await client.post("/v1/messages", json={"model": "e"})
            found["batch"] = await client.post("/v1/batches", json={"input_file_id": "f"})
            found["no json"] = await client.post(
                "/v1/completions", content=b"{", headers={"Content-Type": "application/json"}
            )
            found["pooling"] = await client.post("/v1/embeddings", json={"model": "a"})
            found["no key"] = await client.post(
                "/v1/completions", json={}, headers={"Authorization": "Bearer other"}
            )
            for path in ("/v1/models", "/v1/models/c", "/v1/models/e", "/metrics", "/ready",
                         "/health", "/load", "/openapi.json", "/version"):  # fmt: skip
                found[path] = await client.get(path)
            return found

    found = loop.run(asyncio.wait_for(ask_all(), 300))
    assert {name: one.status_code for name, one in found.items()} == {
        "a": 200, "b": 200, "c": 200, "d": 503, "e": 404, None: 400, 5: 400, "anthropic": 404,
        "batch": 404, "no json": 400, "pooling": 404, "no key": 401,
        "/v1/models": 200, "/v1/models/c": 200,
        "/v1/models/e": 404, "/metrics": 200, "/ready": 503, "/health": 200, "/load": 200,
        "/openapi.json": 200, "/version": 200,
    }  # fmt: skip
    assert [found[name].json()["model"] for name in "abc"] == ["a", "a", "c"]
    error = found["e"].json()["error"]
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert "the names are 'a', 'b', 'c', 'd'" in error["message"]
    assert found["anthropic"].json()["error"]["type"] == "not_found_error"
    assert found["d"].headers["Retry-After"]
    assert [one["id"] for one in found["/v1/models"].json()["data"]] == ["a", "b", "c"]
    ended = {
        sample.labels["model_name"]: sample.value
        for family in text_string_to_metric_families(found["/metrics"].text)
        for sample in family.samples
        if sample.name == "jaxllm:request_success_total"
    }
    assert ended == {"a": 2, "c": 1}


def client_of(app):
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test",
        headers={"Authorization": "Bearer key"},
    )  # fmt: skip


class Asked:
    """A router of Ray Serve's before two replicas, as Ray calls it."""

    def __init__(self):
        from ray.serve._private.common import DeploymentID, ReplicaID

        from jaxllm.server.ray.request_router import PolicyRouter

        self.ids = [ReplicaID(name, DeploymentID("Engine")) for name in "ab"]
        self.router = PolicyRouter.__new__(PolicyRouter)  # without Ray's half
        self.router.initialize_state(policy="least_work", num_reserved=2)
        self.router._policy.set_replicas(self.ids)

    def pending(self, name):
        from ray.serve.request_router import PendingRequest

        from jaxllm.messages import Add, EngineRequest
        from jaxllm.server.ray.work import Work

        one = EngineRequest(
            request_id=name, prompt_token_ids=[1] * 100, sampling_params=SamplingParams(),
            max_tokens=10, seed=0,
        )  # fmt: skip
        metadata: Any = SimpleNamespace(internal_request_id=name)
        return PendingRequest([Work(Add.of([one]))], {}, metadata)

    async def ranked(self, pending, most=7):
        replicas: Any = [
            SimpleNamespace(replica_id=one, max_ongoing_requests=most) for one in self.ids
        ]
        return await self.router.choose_replicas(replicas, pending)

    async def chosen(self, pending):
        ((first,), *_) = await self.ranked(pending)
        return first.replica_id

    def work(self):
        return [self.router._policy._work[one] for one in self.ids]


def test_prompts_leave_room_for_orders_in_a_replica(loop):
    pytest.importorskip("ray.serve")
    from ray.serve.request_router import PendingRequest

    asked = Asked()
    for pending, num, most in (
        (asked.pending("1"), 2, 5),
        (PendingRequest([], {}, asked.pending("2").metadata), 1, 7),
    ):
        found = loop.run(asked.ranked(pending))
        assert len(found) == num
        assert pending.routing_context.should_backoff == (num == 2)
        assert {one.max_ongoing_requests for some in found for one in some} == {most}
    # A config of Serve's own leaves room for orders alone. Then prompts have one of their places.
    ((few,), _) = loop.run(asked.ranked(asked.pending("3"), most=1))
    assert few.max_ongoing_requests == 1


def test_a_request_that_left_before_it_had_a_replica_is_no_work(loop):
    pytest.importorskip("ray.serve")

    async def leave():
        asked = Asked()
        pending = asked.pending("1")
        await asked.chosen(pending)
        await asked.chosen(pending)  # all were full
        assert asked.work() == [110, 0]
        pending.future.cancel()
        await asyncio.sleep(0)
        assert asked.work() == [0, 0]
        # Ray has chosen, and the client leaves before the replica has said yes.
        pending = asked.pending("2")
        await asked.chosen(pending)
        pending.future.set_result(None)
        asked.router.on_request_completed(asked.ids[0], "2")
        assert asked.work() == [0, 0]

    loop.run(leave())


def test_a_request_that_a_replica_refuses_stays_work(loop):
    pytest.importorskip("ray.serve")

    async def refuse():
        asked = Asked()
        a, b = asked.ids
        pending = asked.pending("1")
        assert await asked.chosen(pending) == a
        pending.future.set_result(None)
        pending.reset_future()
        assert await asked.chosen(pending) == a
        asked.router.on_request_completed(a, "1")  # of the first attempt
        assert asked.work() == [110, 0]
        pending.future.set_result(None)
        asked.router.on_request_routed(pending, b, None)
        asked.router.on_request_completed(a, "1")
        assert asked.work() == [0, 110]
        asked.router.on_request_completed(b, "1")
        assert asked.work() == [0, 0]
        assert not asked.router._under_way

    loop.run(refuse())


def on_a_cluster(directory, *parts, **env):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "RAY_AUTH_MODE": "disabled"} | env
    command = [sys.executable, "-m", "tests.server.fleet", str(directory), *parts]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(one for one in done.stdout.splitlines() if one.startswith("{")))


@pytest.mark.sweep
def test_replicas_and_nodes_may_be_lost(tmp_path):
    """The checks of each answer are in the other process."""
    pytest.importorskip("ray.serve")
    found = on_a_cluster(tmp_path / "model", "disconnect", "busy", "lists", "several", "lose")
    assert found["disconnect"]["generated"] < found["disconnect"]["asked"] / 3
    assert found["lists"]["together"] == [found["lists"]["alone"]] * 4
    answers = found["several"]["answers"]
    assert {name: one[0] for name, one in answers.items()} == {
        "first": "first", "second": "second", "adapter": "adapter", "other": 404,
    }  # fmt: skip
    assert answers["first"][1] == answers["second"][1] != answers["adapter"][1]
    assert found["several"]["listed"] == ["first", "second", "adapter"]
    assert max(found["busy"]["figures_s"]) < min(found["busy"]["answers_s"]) / 3
    lost = found["lose"]
    assert lost["again"] == {"whole": 60}
    for name in ("replica", "node"):
        # A replica has four rows, and what waits in it has not begun.
        assert sum(lost[name].values()) == 60 and lost[name].get("begun and lost", 0) <= 4
        assert "lost" not in lost[name]


@pytest.mark.sweep
def test_an_engine_over_hosts_answers_as_one_and_a_lost_rank_is_replaced(tmp_path):
    pytest.importorskip("ray.serve")
    one_device = {"JAX_NUM_CPU_DEVICES": "1", "PJRT_NPROC": "16"}  # threads for both ranks
    found = on_a_cluster(tmp_path / "model", "over hosts", **one_device)["over hosts"]
    assert found["ranks"] == 1 and found["tokens"] == found["alone"]
    assert found["after the loss"] == [True] * 8
    assert found["is replaced"] and not found["left"]


@pytest.mark.sweep
def test_a_replica_a_node_and_the_proxy_are_lost_one_after_another(tmp_path):
    pytest.importorskip("ray.serve")
    found = on_a_cluster(tmp_path / "model", "storm")["storm"]
    assert found["again"] == {"whole": 60}
    assert sum(found["storm"].values()) == 300 and "lost" not in found["storm"]
    # Two replicas of four rows were killed, and what waits in them has not begun.
    assert found["storm"].get("begun and lost", 0) <= 8


@pytest.mark.sweep
def test_a_fleet_scales_and_routes_by_prefixes_as_simulated(tmp_path):
    pytest.importorskip("ray.serve")
    found = on_a_cluster(tmp_path / "model", "scale", "scale by cache", "prefix", "random")
    for part in ("scale", "scale by cache"):
        seen = found[part]["seen"]
        assert (seen[0], max(seen), seen[-1]) == (1, 3, 1)
        assert all(set(one) == {"whole"} for one in found[part]["answers"])
    for policy in ("prefix", "random"):
        assert found[policy]["hit_rate"] == pytest.approx(found[policy]["simulated"], rel=0.1)
    assert found["prefix"]["hit_rate"] > 1.2 * found["random"]["hit_rate"]
