"""A fleet on a Ray cluster of three nodes, all on this machine, in a process of its own:
`python -m tests.server.fleet DIRECTORY PART`. It prints what it has found as one line of JSON.

Nodes are processes of Ray's, so that one is lost as a machine would be.
"""

import asyncio
import collections
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
from ray import serve
from ray.cluster_utils import Cluster

from jaxllm import LLM, SamplingParams
from jaxllm.cache_groups import CacheGroup
from jaxllm.messages import EngineInfo
from jaxllm.plan.buckets import make_ladder
from jaxllm.server.ray import app, build
from jaxllm.simulation.deployment import Deployment
from jaxllm.simulation.simulator import simulate
from jaxllm.simulation.trace import Trace
from jaxllm.testing import make_tiny_adapter, make_tiny_checkpoint
from tests.ports import free_port
from tests.profile import SHARDED, SHARDED_MODEL, TINY

ENGINE = TINY | {"max_model_len": 1024, "num_gpu_blocks_override": 1024}
ACTORS: dict[str, Any] = {
    "ray_actor_options": {"num_cpus": 0, "resources": {"engine": 1}},
    "frontend_actor_options": {"num_cpus": 0, "resources": {"frontend": 1}},
}
NUM_ANSWERS, LENGTH = 60, 120
NUM_IN_STORM = 300
CUT = "the connection was cut"
WAIT_S = 240


class Fleet:
    """A cluster, the application of one test, and its clients."""

    def __init__(self, directory: str):
        self.model = str(make_tiny_checkpoint(Path(directory)))
        head = {"num_cpus": 1, "include_dashboard": False, "resources": {"frontend": 1}}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(num_cpus=1, resources={"engine": 1}) for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver="--log" in sys.argv)
        port = free_port()
        # A proxy at the head alone: others would want the same port.
        serve.start(http_options={"port": port, "location": "HeadOnly"})
        self.url = f"http://127.0.0.1:{port}/tiny"
        self.num_pieces = 0  # that clients have got
        self.num_asked_again = 0

    def start(self, **options: Any) -> None:
        serve.run(build(model=self.model, **ENGINE, **ACTORS, **options), route_prefix="/tiny")

    def replicas(self) -> list[str]:
        """The names of the engines' actors."""
        return self.actors("#Engine#")

    def actors(self, part: str) -> list[str]:
        """The actors that have this in their names."""
        named: Any = ray.util.list_named_actors(all_namespaces=True)
        return sorted(one["name"] for one in named if part in one["name"])

    def num_running(self) -> int:
        states: Any = serve.status().applications["default"].deployments["Engine"].replica_states
        return states.get("RUNNING", 0)

    def await_running(self, num: int) -> None:
        end = time.monotonic() + WAIT_S
        while self.num_running() != num:
            assert time.monotonic() < end, serve.status()
            time.sleep(0.2)

    async def answer(self, client: httpx.AsyncClient, place: int, stream: bool) -> dict[str, Any]:
        """The text of an answer, and how it ended. If there is no connection, or it is cut before
        anything has come, the client asks again, as clients do."""
        while True:
            found: dict[str, Any] = {"text": "", "ends": []}
            try:
                await self._read(client, place, stream, found)
            except httpx.TransportError:
                if not found["text"]:
                    self.num_asked_again += 1
                    await asyncio.sleep(0.2)
                    continue
                found["ends"].append(CUT)
            return found

    async def _read(
        self, client: httpx.AsyncClient, place: int, stream: bool, found: dict[str, Any]
    ) -> None:
        body = {"prompt": f"Number {place}", "max_tokens": LENGTH, "temperature": 0}
        body |= {"ignore_eos": True, "stream": stream}
        ends = found["ends"]
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if not stream or response.status_code != 200:
                await response.aread()
                if response.status_code != 200:
                    ends.append(_reason(response))
                    return
                (choice,) = response.json()["choices"]
                found["text"] = choice["text"]
                ends.append(choice["finish_reason"])
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self.num_pieces += 1
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        ends.append(event["error"]["message"])
                        continue
                    (choice,) = event["choices"]
                    found["text"] += choice["text"]
                    if choice["finish_reason"] is not None:
                        ends.append(choice["finish_reason"])
            if not ends:
                ends.append(CUT)  # the proxy that was killed has closed it

    async def answers(self, num: int, during: Any = None) -> list[dict[str, Any]]:
        """Answer prompts, every third one as a whole, while something else happens."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=WAIT_S, limits=limits) as client:
            tasks = [self.answer(client, i, stream=i % 3 > 0) for i in range(num)]
            found = asyncio.gather(*tasks)
            if during is not None:
                await during(client)
            return await found

    async def num_generated(self, client: httpx.AsyncClient) -> float:
        return await self.figure(client, "generation_tokens")

    async def figure(self, client: httpx.AsyncClient, name: str) -> float:
        """A figure in /metrics, of all engines together."""
        text = (await client.get(f"{self.url}/metrics")).text
        lines = [one for one in text.splitlines() if one.startswith(f"jaxllm:{name}")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def await_generated(self, client: httpx.AsyncClient, num: int) -> None:
        start = await self.num_generated(client)
        while await self.num_generated(client) < start + num:
            await asyncio.sleep(0.05)


def _reason(response: httpx.Response) -> str:
    """Why there is no answer: in our words, or in those of Serve's proxy."""
    try:
        return response.json()["error"]["message"]
    except ValueError:
        return f"{response.status_code}: {response.text}"


def check(found: list[dict[str, Any]], alone: list[dict[str, Any]]) -> dict[str, int]:
    """Count answers. Whole ones are as in an idle fleet; others begin so, and have a reason."""
    counted: collections.Counter[str] = collections.Counter()
    for one, expected in zip(found, alone, strict=True):
        assert len(one["ends"]) == 1, one
        if one["ends"] == ["length"]:
            assert one["text"] == expected["text"], (one, expected)
            counted["whole"] += 1
        else:
            assert expected["text"].startswith(one["text"]), (one, expected)
            was_cut = one["ends"] == [CUT]
            assert was_cut or "replica" in one["ends"][0], one
            kind = "begun and cut" if was_cut else "begun and lost"
            counted[kind if one["text"] else "lost"] += 1
    return dict(counted)


async def lose_replicas(fleet: Fleet) -> dict[str, Any]:
    """Kill a replica, and then a node, with answers under way."""
    fleet.start(num_replicas=2)
    alone = await fleet.answers(NUM_ANSWERS)
    assert all(one["ends"] == ["length"] for one in alone), alone

    async def kill_replica(client: httpx.AsyncClient) -> None:
        await fleet.await_generated(client, 400)
        ray.kill(ray.get_actor(fleet.replicas()[0], namespace="serve"))

    async def kill_node(client: httpx.AsyncClient) -> None:
        await fleet.await_generated(client, 400)
        fleet.cluster.remove_node(fleet.nodes[0], allow_graceful=False)

    replica = check(await fleet.answers(NUM_ANSWERS, kill_replica), alone)
    fleet.await_running(2)
    again = check(await fleet.answers(NUM_ANSWERS), alone)
    node = check(await fleet.answers(NUM_ANSWERS, kill_node), alone)
    return {"replica": replica, "again": again, "node": node}


async def storm(fleet: Fleet) -> dict[str, Any]:
    """Kill a replica, a node and the proxy, one after another, under many streams."""
    fleet.start(num_replicas=2)
    alone = await fleet.answers(NUM_IN_STORM)
    assert all(one["ends"] == ["length"] for one in alone), alone
    fleet.num_asked_again = 0

    async def pieces(num: int) -> None:
        end = fleet.num_pieces + num
        while fleet.num_pieces < end:
            await asyncio.sleep(0.02)

    async def kill(client: httpx.AsyncClient) -> None:
        await pieces(2000)
        ray.kill(ray.get_actor(fleet.replicas()[0], namespace="serve"))
        print("killed a replica", file=sys.stderr)
        await pieces(2000)
        fleet.cluster.remove_node(fleet.nodes.pop(), allow_graceful=False)
        print("killed a node", file=sys.stderr)
        await pieces(2000)
        for name in fleet.actors("PROXY"):
            ray.kill(ray.get_actor(name, namespace="serve"), no_restart=False)
        print("killed the proxy", file=sys.stderr)

    counted = check(await fleet.answers(NUM_IN_STORM, kill), alone)
    fleet.nodes.append(fleet.cluster.add_node(num_cpus=1, resources={"engine": 1}))
    fleet.await_running(2)
    again = check(await fleet.answers(NUM_ANSWERS), alone[:NUM_ANSWERS])
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        while await fleet.figure(client, "num_requests_running"):
            await asyncio.sleep(0.2)  # for as long as the test may take
    return {"storm": counted, "asked again": fleet.num_asked_again, "again": again}


async def scale(fleet: Fleet, **targets: float) -> dict[str, Any]:
    """Scale 1 -> 3 -> 1 with answers under way."""
    third = fleet.cluster.add_node(num_cpus=1, resources={"engine": 1})
    scaling: dict[str, Any] = {"min_replicas": 1, "max_replicas": 3, **targets}
    scaling |= {"upscale_delay_s": 1, "downscale_delay_s": 15, "look_back_period_s": 2}
    scaling |= {"metrics_interval_s": 0.5}
    fleet.start(autoscaling_config=scaling)
    alone = await fleet.answers(NUM_ANSWERS)
    fleet.await_running(1)
    seen, found = [1], []
    end = time.monotonic() + WAIT_S
    while 3 not in seen or seen[-1] != 1:
        assert time.monotonic() < end, seen
        num = NUM_ANSWERS if 3 not in seen else 2
        found.append(check(await fleet.answers(num), alone[:num]))
        if (now := fleet.num_running()) != seen[-1]:
            seen.append(now)
    fleet.cluster.remove_node(third)
    return {"seen": seen, "answers": found}


async def disconnect(fleet: Fleet) -> dict[str, Any]:
    """Clients leave; their requests end in the engines."""
    fleet.start(num_replicas=1)
    body = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        await fleet.answer(client, 0, stream=False)
        before = await fleet.num_generated(client)
        for _ in range(3):
            async with client.stream("POST", f"{fleet.url}/v1/completions", json=body) as response:
                await anext(response.aiter_lines())
        after, last = -1.0, 0.0
        while after != last:
            last, after = after, await fleet.num_generated(client)
            await asyncio.sleep(1)
        return {"generated": after - before, "asked": 3 * 400}


async def busy(fleet: Fleet) -> dict[str, Any]:
    """Read the figures of a replica that has as many requests as it may have, while more wait."""
    fleet.start(num_replicas=1, max_ongoing_requests=2)
    body = {"prompt": "Hi", "max_tokens": 900, "ignore_eos": True, "temperature": 0}

    async def timed(client: httpx.AsyncClient, method: str, path: str, **more: Any) -> float:
        start = time.monotonic()
        (await client.request(method, f"{fleet.url}{path}", **more)).raise_for_status()
        return time.monotonic() - start

    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        post = [timed(client, "POST", "/v1/completions", json=body) for _ in range(6)]
        answers = asyncio.gather(*post)
        await fleet.await_generated(client, 20)
        figures = [await timed(client, "GET", "/metrics") for _ in range(5)]
        return {"answers_s": await answers, "figures_s": figures}


async def lists(fleet: Fleet) -> dict[str, Any]:
    """Several prompts in one request, and the same prompts one by one."""
    fleet.start(num_replicas=2)
    prompts = [f"Number {i}" for i in range(9)]
    body: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}

    async def texts(client: httpx.AsyncClient, prompt: Any) -> list[str]:
        response = await client.post(f"{fleet.url}/v1/completions", json=body | {"prompt": prompt})
        return [one["text"] for one in response.raise_for_status().json()["choices"]]

    async with httpx.AsyncClient(timeout=60) as client:
        alone = [(await texts(client, one))[0] for one in prompts]
        together = await asyncio.gather(*(texts(client, prompts) for _ in range(4)))
        return {"alone": alone, "together": together}


async def several(fleet: Fleet) -> dict[str, Any]:
    """Two models, of which one has an adapter, behind one server."""
    adapter = make_tiny_adapter(Path(fleet.model).with_name("adapter"), fleet.model)
    entry = {"model": fleet.model, "ray_actor_options": ACTORS["ray_actor_options"], **ENGINE}
    first = {"served_model_name": ["first"], "max_num_seqs": 2, "num_replicas": 1}
    second = {"served_model_name": ["second"], "enable_lora": True, "max_lora_rank": 8}
    second |= {"lora_modules": [f"adapter={adapter}"]}
    second |= {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}}
    arguments = {
        "models": [entry | first, entry | second],
        "frontend_actor_options": ACTORS["frontend_actor_options"],
    }
    serve.run(app(arguments), route_prefix="/tiny")
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        found: dict[str, Any] = {}
        for name in ("first", "second", "adapter", "other"):
            body = {"model": name, "prompt": "Hi", "max_tokens": 9, "temperature": 0}
            response = await client.post(f"{fleet.url}/v1/completions", json=body)
            answer = response.json()
            if response.status_code == 200:
                found[name] = (answer["model"], answer["choices"][0]["text"])
            else:
                found[name] = (response.status_code, answer["error"]["message"])
        listed = (await client.get(f"{fleet.url}/v1/models")).json()["data"]
        return {"answers": found, "listed": [one["id"] for one in listed]}


async def over_hosts(fleet: Fleet) -> dict[str, Any]:
    """A replica whose engine has two ranks on two nodes; the second one is killed."""
    prompts = [[5, 6, 7], [*range(40)], [9] * 17]
    model = str(make_tiny_checkpoint(Path(fleet.model).with_name("sharded"), **SHARDED_MODEL))
    options = SHARDED | ACTORS | {"nnodes": 2, "tensor_parallel_size": 2, "model": model}
    scaling = {"min_replicas": 1, "max_replicas": 1}

    def ranks() -> list[str]:
        return [one for one in fleet.actors("#Engine-") if one.endswith("#rank-1")]

    def kill(rank: str) -> None:
        named: Any = ray.util.list_named_actors(all_namespaces=True)
        (space,) = [one["namespace"] for one in named if one["name"] == rank]
        ray.kill(ray.get_actor(rank, namespace=space))

    async def tokens(client: httpx.AsyncClient, prompt: list[int], **more: Any) -> list[int]:
        body = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 9, **more}
        body |= {"return_token_ids": True}
        response = await client.post(f"{fleet.url}/v1/completions", json=body)
        return response.raise_for_status().json()["choices"][0]["token_ids"]

    front = ACTORS["frontend_actor_options"]
    entry = options | {"served_model_name": ["m"], "autoscaling_config": scaling}
    del entry["frontend_actor_options"]
    serve.run(app({"models": [entry], "frontend_actor_options": front}), route_prefix="/tiny")
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        found: dict[str, Any] = {"ranks": len(ranks())}
        found["tokens"] = [await tokens(client, one) for one in prompts]
        more = {"max_tokens": 80, "ignore_eos": True}
        long = await tokens(client, prompts[0], **more)
        before = ranks()
        answers = asyncio.gather(*(tokens(client, prompts[0], **more) for _ in range(8)))
        await fleet.await_generated(client, 40)
        kill(before[0])
        found["after the loss"] = [one == long for one in await answers]
        found["is replaced"] = ranks() != before and len(ranks()) == 1
    serve.delete("default")
    found["left"] = ranks()
    return found | {"alone": one_process(model, prompts)}


def one_process(model: str, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of an engine in a single process."""
    params = SamplingParams(temperature=0, max_tokens=9)
    outputs = LLM(model, **SHARDED).generate(prompts, params, use_tqdm=False)
    return [one.outputs[0].token_ids for one in outputs]


async def routed(fleet: Fleet, policy: str) -> dict[str, Any]:
    """The share of prompts' tokens that were cached, with prompts of a few heads."""
    fleet.start(num_replicas=2, routing_policy=policy)
    fleet.await_running(2)
    cached = asked = 0
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        for tokens in prompts_with_heads():
            body = {"prompt": tokens, "max_tokens": 4, "ignore_eos": True}
            response = await client.post(f"{fleet.url}/v1/completions", json=body)
            usage = response.json()["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            asked += usage["prompt_tokens"]
    return {"hit_rate": cached / asked, "simulated": simulated(policy)}


# Prompts of a head that some share, and of tokens of their own, in turns.
NUM_HEADS, NUM_TURNS, HEAD_LENGTH, OWN_LENGTH = 12, 4, 512, 64


def prompts_with_heads() -> list[list[int]]:
    return [
        [(head * 31 + i * 7) % 250 + 3 for i in range(HEAD_LENGTH)]
        + [(head * 17 + turn * 13 + i * 3) % 250 + 3 for i in range(OWN_LENGTH)]
        for turn in range(NUM_TURNS)
        for head in range(NUM_HEADS)
    ]


class _Second:
    """A step takes a second."""

    num_stages = 1

    def seconds(self, bucket: Any, schedule: Any) -> list[float]:
        return [1.0]


def simulated(policy: Any) -> float:
    """The hit rate of these prompts, one after another."""
    num, length = NUM_HEADS * NUM_TURNS, HEAD_LENGTH + OWN_LENGTH
    groups = (CacheGroup(window=None, num_blocks=1024, max_blocks_per_request=64),)
    info = EngineInfo(
        model="model", model_dir="", vocab_size=1 << 31, max_model_len=1024, max_logprobs=0,
        eos_token_ids=[], max_num_seqs=4, max_num_batched_tokens=64, cache_groups=groups,
        block_size=16,
    )  # fmt: skip
    ladder = make_ladder(max_num_seqs=4, max_num_batched_tokens=64, block_size=16, min_rows=2)
    replica = Deployment(
        name="model", num_chips=1, info=info, buckets=ladder, step_time=_Second(),
        host_s_per_step=0.0,
    )  # fmt: skip
    trace = Trace(
        arrivals=np.arange(num) * 100.0,
        num_prompt_tokens=np.full(num, length, np.int32),
        num_output_tokens=np.full(num, 4, np.int32),
        pieces=[(place % NUM_HEADS,) for place in range(num)],
    )
    return simulate(trace, replica, 2, routing_policy=policy).stats.prefix_cache_hit_rate


PARTS = {
    "lose": lose_replicas,
    "storm": storm,
    "scale": lambda fleet: scale(fleet, target_ongoing_requests=6),
    # Four rows of an engine hold 0.035 of its cache.
    "scale by cache": lambda fleet: scale(
        fleet, target_ongoing_requests=1000, target_kv_cache_usage=0.015
    ),
    "disconnect": disconnect,
    "busy": busy,
    "lists": lists,
    "several": several,
    "over hosts": over_hosts,
    "prefix": lambda fleet: routed(fleet, "prefix"),
    "random": lambda fleet: routed(fleet, "random"),
}


def main() -> None:
    directory, *parts = (one for one in sys.argv[1:] if one != "--log")
    fleet = Fleet(directory)
    found = {}
    for part in parts:
        found[part] = asyncio.run(PARTS[part](fleet))
        serve.delete("default")
    print(json.dumps(found), flush=True)
    serve.shutdown()
    ray.shutdown()
    fleet.cluster.shutdown()


if __name__ == "__main__":
    main()
