"""Several processes are one engine: the same tokens, and a clean end when one of them is lost.

They meet on this machine as they would over a network: JAX joins their CPU devices through gloo.
"""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.testing import make_tiny_checkpoint
from tests.ports import free_port
from tests.profile import OVER_HOSTS, SHARDED_MODEL

# What a rank runs: the same on each, as users do it. Rank 0 says its answers. Gloo's threads print,
# too, and into each other's lines.
SCRIPT = """
import json, sys
from jaxllm import LLM, SamplingParams

def say(text):
    print("said", text, flush=True)

options, requests = json.loads(sys.argv[1]), json.loads(sys.argv[2])
llm = LLM(**options)
engine = llm.llm_engine
for index, (prompt, params) in enumerate(requests):
    engine.add_request(str(index), prompt, SamplingParams(**params))
answers, told = {}, False
while engine.has_unfinished_requests():
    for output in engine.step():
        if not told:
            say("running")
            told = True
        if output.finished:
            answers[output.request_id] = [
                [a.token_ids, a.cumulative_logprob, a.finish_reason, a.stop_reason]
                for a in output.outputs
            ]
say(json.dumps([answers[str(index)] for index in range(len(requests))]))
if sys.argv[3] == "ask again":
    try:
        engine.add_request("more", [1, 2], SamplingParams())
    except RuntimeError as error:
        say(type(error).__name__)
"""

FORM = {"regex": "a[b-f]{4}: (yes|no), it is so"}
HEAD = list(range(20, 60))  # shared, and longer than a chunk
REQUESTS = [
    ([5, 6, 7], {"temperature": 0, "max_tokens": 12, "logprobs": 25}),
    (HEAD + [3], {"seed": 1, "top_k": 30, "top_p": 0.9, "max_tokens": 10, "logprobs": 1}),
    (HEAD + [4, 5], {"temperature": 0, "repetition_penalty": 1.3, "max_tokens": 20, "logprobs": 1}),
    ([9] * 30, {"seed": 2, "n": 2, "min_p": 0.02, "max_tokens": 8, "logprobs": 1}),
    ([8, 1], {"temperature": 0, "logit_bias": {"7": 4.0}, "max_tokens": 9, "logprobs": 1}),
    # Masks reach every rank, and tokens that a grammar forces as well.
    ([4, 9, 2], {"seed": 3, "max_tokens": 20, "logprobs": 1, "structured_outputs": FORM}),
]
ENDLESS = [([5, 6, 7], {"max_tokens": 100_000, "ignore_eos": True, "seed": 1})]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), **SHARDED_MODEL)
    return OVER_HOSTS | {"model": str(path)}


def said(out):
    return re.findall(r"^said (.*)$", out, re.M)


class Ranks:
    """Processes that run an engine together; none outlives the test."""

    def __init__(
        self,
        options,
        requests,
        *,
        nnodes,
        devices=1,
        then="",
        differing=None,
        env_of=None,
        script=SCRIPT,
    ):
        port = free_port()
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PJRT_NPROC": "16",  # gloo starves with two devices and as many threads
        }
        self.processes = []
        for rank in range(nnodes):
            its = options | {"nnodes": nnodes, "node_rank": rank, "master_port": port}
            if env_of is not None:
                env |= env_of(rank, nnodes)
                its = options | {"nnodes": "auto"}
            its |= (differing or {}) if rank else {}
            command = [sys.executable, "-c", script, json.dumps(its), json.dumps(requests), then]
            self.processes.append(
                subprocess.Popen(
                    command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()

    def until_running(self):
        """Wait for the first token."""
        lines = iter(self.processes[0].stdout.readline, "")
        assert any(said(line) == ["running"] for line in lines), self.processes[0].stderr.read()

    def ends(self, timeout=300):
        """How each rank ended: exit status, what it said, and what it complained of."""
        found = []
        for process in self.processes:
            out, err = process.communicate(timeout=timeout)
            found.append((process.returncode, said(out), err))
        return found


def answers_of_one_process(options):
    llm = LLM(**options)
    outputs = llm.generate(
        [prompt for prompt, _ in REQUESTS],
        [SamplingParams(**_numbered(params)) for _, params in REQUESTS],
        use_tqdm=False,
    )
    return [
        [[a.token_ids, a.cumulative_logprob, a.finish_reason, a.stop_reason] for a in one.outputs]
        for one in outputs
    ]


def _numbered(params):
    bias = params.get("logit_bias")
    return params | ({"logit_bias": {int(k): v for k, v in bias.items()}} if bias else {})


@pytest.fixture(scope="module")
def expected(options):
    return answers_of_one_process(options | {"tensor_parallel_size": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nnodes", "devices", "tensor", "data"),
    [
        (2, 1, 1, 2),  # a replica that rank 0 has no part in
        # And that is on two hosts.
        pytest.param(4, 1, 2, 2, marks=pytest.mark.sweep),
        pytest.param(2, 2, 4, 1, marks=pytest.mark.sweep),
        pytest.param(2, 1, 2, 1, marks=pytest.mark.sweep),
    ],
)
def test_hosts_give_the_tokens_of_one(nnodes, devices, tensor, data, options, expected):
    options = options | {"tensor_parallel_size": tensor, "data_parallel_size": data}
    with Ranks(options, REQUESTS, nnodes=nnodes, devices=devices) as ranks:
        assert_answered(ranks.ends(), expected)


def assert_answered(ends, expected):
    """Rank 0 has said the answers of one process, and all have ended well."""
    (status, lines, err), *others = ends
    assert status == 0, err
    for mine, theirs in zip(json.loads(lines[-1]), expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert (one[0], one[2:]) == (other[0], other[2:])
            np.testing.assert_allclose(one[1], other[1], atol=1e-3)
    for status, lines, err in others:
        assert (status, lines) == (0, []), err


def slurm(rank, nnodes):
    """What SLURM tells a task of a job."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(nnodes),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nnodes", "data"),
    [
        (2, 1),
        # Two replicas, each over two hosts. Rank 0 has no part in one of them.
        pytest.param(4, 2, marks=pytest.mark.sweep),
    ],
)
def test_ranks_meet_by_what_their_environment_says(nnodes, data, options, expected):
    """Each of them has two devices, which are more than kv heads in all."""
    options = options | {"data_parallel_size": data}
    with Ranks(options, REQUESTS, nnodes=nnodes, devices=2, env_of=slurm) as ranks:
        assert_answered(ranks.ends(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_follower_ends_the_requests_and_the_engine(how, options):
    with Ranks(options, ENDLESS, nnodes=2, devices=2, then="ask again") as ranks:
        ranks.until_running()
        ranks.processes[1].send_signal(how)
        leader = ranks.processes[0]
        out, err = leader.communicate(timeout=300)
    answers, after = said(out)
    ((_, _, reason, why),) = json.loads(answers)[0]
    assert (reason, leader.returncode) == ("error", 1), err
    assert "rank 1 is" in why, (why, err)
    assert after == "EngineDeadError"


@pytest.mark.slow
def test_a_lost_leader_ends_its_followers(options):
    with Ranks(options, ENDLESS, nnodes=2, devices=2) as ranks:
        ranks.until_running()
        ranks.processes[0].kill()
        _, err = ranks.processes[1].communicate(timeout=300)
        assert ranks.processes[1].returncode not in (0, None), err


@pytest.mark.slow
def test_ranks_with_other_options_are_refused_by_name(options):
    options = options | {"tensor_parallel_size": 2}
    with Ranks(options, REQUESTS, nnodes=2, differing={"max_num_seqs": 2}) as ranks:
        leader, follower = ranks.ends(timeout=300)
    assert leader[0] != 0 and follower[0] != 0
    assert "rank 1 was started with another max_num_seqs than rank 0: 2, not 4" in leader[2]


@pytest.mark.slow
def test_a_rank_with_nothing_to_do_is_refused(options):
    options = options | {"tensor_parallel_size": 1}
    with Ranks(options, REQUESTS, nnodes=2) as ranks:
        leader, follower = ranks.ends(timeout=300)
    assert leader[0] != 0 and follower[0] != 0
    assert "ranks [1] would have nothing to do" in leader[2]
