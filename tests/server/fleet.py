"""A fleet on a Ray cluster of three nodes, all on this machine, in a process of its own:
`python -m tests.server.fleet DIRECTORY PART`. It prints what it has found as one line of JSON.

Nodes are processes of Ray's, so that one is lost as a machine would be.
"""

import asyncio
import collections
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
from ray import serve
from ray.cluster_utils import Cluster

from jaxllm.cache_groups import CacheGroup
from jaxllm.messages import EngineInfo
from jaxllm.plan.buckets import make_ladder
from jaxllm.server.ray import build
from jaxllm.simulation.deployment import Deployment
from jaxllm.simulation.simulator import simulate
from jaxllm.simulation.trace import Trace
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

ENGINE = TINY | {"max_model_len": 1024, "num_gpu_blocks_override": 1024}
ACTORS: dict[str, Any] = {
    "ray_actor_options": {"num_cpus": 0, "resources": {"engine": 1}},
    "frontend_actor_options": {"num_cpus": 0, "resources": {"frontend": 1}},
}
NUM_ANSWERS, LENGTH = 60, 120
WAIT_S = 240


class Fleet:
    """A cluster, the application of one test, and its clients."""

    def __init__(self, directory: str):
        self.model = str(make_tiny_checkpoint(Path(directory)))
        head = {"num_cpus": 1, "include_dashboard": False, "resources": {"frontend": 1}}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(num_cpus=1, resources={"engine": 1}) for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver="--log" in sys.argv)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # A proxy at the head alone: others would want the same port.
        serve.start(http_options={"port": port, "location": "HeadOnly"})
        self.url = f"http://127.0.0.1:{port}/tiny"

    def start(self, **options: Any) -> None:
        serve.run(build(model=self.model, **ENGINE, **ACTORS, **options), route_prefix="/tiny")

    def replicas(self) -> list[str]:
        """The names of the engines' actors."""
        named: Any = ray.util.list_named_actors(all_namespaces=True)
        return sorted(one["name"] for one in named if "#Engine#" in one["name"])

    def num_running(self) -> int:
        states: Any = serve.status().applications["default"].deployments["Engine"].replica_states
        return states.get("RUNNING", 0)

    def await_running(self, num: int) -> None:
        end = time.monotonic() + WAIT_S
        while self.num_running() != num:
            assert time.monotonic() < end, serve.status()
            time.sleep(0.2)

    async def answer(self, client: httpx.AsyncClient, place: int, stream: bool) -> dict[str, Any]:
        """The text of an answer, and how it ended."""
        body = {"prompt": f"Number {place}", "max_tokens": LENGTH, "temperature": 0}
        body |= {"ignore_eos": True, "stream": stream}
        text, ends = "", []
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if not stream or response.status_code != 200:
                await response.aread()
                found = response.json()
                if response.status_code != 200:
                    return {"text": "", "ends": [found["error"]["message"]]}
                (choice,) = found["choices"]
                return {"text": choice["text"], "ends": [choice["finish_reason"]]}
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        ends.append(event["error"]["message"])
                        continue
                    (choice,) = event["choices"]
                    text += choice["text"]
                    if choice["finish_reason"] is not None:
                        ends.append(choice["finish_reason"])
        return {"text": text, "ends": ends}

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
        text = (await client.get(f"{self.url}/metrics")).text
        lines = [one for one in text.splitlines() if one.startswith("jaxllm:generation_tokens")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def await_generated(self, client: httpx.AsyncClient, num: int) -> None:
        start = await self.num_generated(client)
        while await self.num_generated(client) < start + num:
            await asyncio.sleep(0.05)


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
            assert "replica" in one["ends"][0], one
            counted["begun and lost" if one["text"] else "lost"] += 1
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


async def scale(fleet: Fleet) -> dict[str, Any]:
    """Scale 1 -> 2 -> 1 with answers under way."""
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 6}
    scaling |= {"upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 2}
    scaling |= {"metrics_interval_s": 0.5}
    fleet.start(autoscaling_config=scaling)
    alone = await fleet.answers(NUM_ANSWERS)
    fleet.await_running(1)
    seen, found = [1], []
    end = time.monotonic() + WAIT_S
    while seen != [1, 2, 1]:
        assert time.monotonic() < end, seen
        num = NUM_ANSWERS if 2 not in seen else 2
        found.append(check(await fleet.answers(num), alone[:num]))
        if (now := fleet.num_running()) != seen[-1]:
            seen.append(now)
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
    "scale": scale,
    "disconnect": disconnect,
    "busy": busy,
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
