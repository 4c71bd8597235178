"""What one engine has computed of a prompt, another takes over: it answers to the bit as if it had
computed all of it, and computes less than a block of the prompt."""

import os
import queue
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams, ValidationError
from jaxllm.config import EngineConfig
from jaxllm.handover.source import BlockSource
from jaxllm.offload import identity
from jaxllm.offload.identity import shared_identity
from jaxllm.plan.make_plan import make_plan
from jaxllm.scheduler.schedule import Arrival, BlockMoves
from jaxllm.testing import make_tiny_checkpoint
from tests.engine.test_offload import PARAMS, PROMPTS, answers
from tests.profile import TINY

GIVE = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("known to few of us\n")
    return str(path)


@pytest.fixture(scope="module")
def expected(model):
    return answers(LLM(model, **TINY).generate(PROMPTS, PARAMS, use_tqdm=False))


def engine(model, secret, role, **options):
    host = {"kv_offloading_size": 0.01, "kv_secret_file": secret, "kv_role": role}
    host["kv_timeout"] = 200  # what is there comes, however busy the machine is
    return LLM(model, **TINY | {"check_invariants": True} | host | options)


@pytest.fixture(scope="module")
def giver(model, secret):
    return engine(model, secret, "kv_producer")


def with_transfer(params, transfer):
    return params.clone(extra_args={"kv_transfer_params": transfer})


def compute(giver, prompts=PROMPTS):
    """Let an engine compute prompts; return what it says of them to others."""
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": GIVE})
    outputs = giver.generate(prompts, params, use_tqdm=False)
    return [output.kv_transfer_params for output in outputs]


def go_on(taker, transfers, prompts=PROMPTS, params=PARAMS):
    params = [with_transfer(*pair) for pair in zip(params, transfers, strict=True)]
    return taker.generate(prompts, params, use_tqdm=False)


def stats(llm):
    return llm.llm_engine.stats()


def num_full_blocks(prompts=PROMPTS):
    return sum((len(prompt) - 1) // TINY["block_size"] for prompt in prompts)


def test_answers_are_the_same_and_prompts_are_not_computed_again(model, secret, giver, expected):
    taker = engine(model, secret, "kv_consumer")
    giver.generate(PROMPTS, PARAMS, use_tqdm=False)  # so that their blocks are on its devices
    for attempt in range(2):
        outputs = go_on(taker, compute(giver))
        assert answers(outputs) == expected
        assert [one.kv_transfer_params for one in outputs] == [None] * len(outputs)
        its = stats(taker)
        assert its.blocks_taken == num_full_blocks() * (attempt + 1)
        assert not its.blocks_not_taken
        assert (
            its.num_prompt_tokens == sum(map(len, PROMPTS)) * (attempt + 1) - 16 * its.blocks_taken
        )
        assert stats(giver).blocks_given == its.blocks_taken
        taker.reset_prefix_cache()


def test_what_cannot_be_had_is_computed(model, secret, expected, tmp_path):
    """A giver that is gone, that has other weights, or that others know by another secret."""
    giver = engine(model, secret, "kv_producer")
    transfers = compute(giver)
    other = str(make_tiny_checkpoint(tmp_path / "other", seed=1))
    foreign = engine(other, secret, "kv_consumer")
    alone = LLM(other, **TINY).generate(PROMPTS, PARAMS, use_tqdm=False)
    assert answers(go_on(foreign, transfers)) == answers(alone)
    assert stats(foreign).blocks_taken == 0 < stats(foreign).blocks_not_taken
    giver.llm_engine.shutdown()
    taker = engine(model, secret, "kv_both", kv_timeout=0.3)
    assert answers(go_on(taker, transfers)) == expected
    assert stats(taker).blocks_taken == 0 < stats(taker).blocks_not_taken
    # Which gives in turn.
    assert compute(taker)[0]["remote_port"] != transfers[0]["remote_port"]


def test_nobody_waits_for_a_giver_that_is_silent(model, secret, expected):
    giver = engine(model, secret, "kv_producer")
    transfers = compute(giver)
    giver.llm_engine.shutdown()
    taker = engine(model, secret, "kv_consumer", kv_timeout=200)
    runner = taker.llm_engine
    # The last one has the head of one that waits: it computes it, and does not wait, too.
    prompts = [*PROMPTS[:5], PROMPTS[0]]
    for index, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True)):
        if index < 3:
            params = with_transfer(params, transfers[index])
        runner.add_request(str(index), {"prompt_token_ids": prompt}, params)
    done = {}
    while len(done) < 3:
        done |= {output.request_id: output for output in runner.step() if output.finished}
    assert answers([done[str(index)] for index in (3, 4)]) == expected[3:5]
    assert not any(output.finished for output in runner.step())
    runner.abort_request(["0", "1", "2"])
    while runner.has_unfinished_requests():
        runner.step()
    assert stats(taker).num_blocks_used == 0


def test_salts_keep_users_apart(giver, model, secret, expected):
    taker = engine(model, secret, "kv_consumer")
    transfers = compute(giver)
    salted = [{"prompt_token_ids": its, "cache_salt": "mine"} for its in PROMPTS]
    assert answers(go_on(taker, transfers, salted)) == expected
    assert stats(taker).blocks_taken == 0
    taker.reset_prefix_cache()
    mine = compute(giver, salted)
    assert answers(go_on(taker, mine, salted)) == expected
    assert stats(taker).blocks_taken == num_full_blocks()


@pytest.mark.parametrize(
    ("transfer", "names"),
    [
        (1, "kv_transfer_params"),
        ({"do_remote_decode": True}, "do_remote_decode"),
        ({"do_remote_prefill": 1}, "do_remote_prefill"),
        ({"do_remote_prefill": True}, "remote_host"),
        ({"do_remote_prefill": True, "remote_block_ids": [1]}, "remote_block_ids"),
        ({"do_remote_prefill": True, "tp_size": 2}, "tp_size"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 22}, "remote_mark"),
        ({"remote_host": "10.0.0.1"}, "remote_mark"),
        ({"remote_mark": "\udc80"}, "remote_mark"),
    ],
)
def test_refusals_name_the_field(giver, model, taker, transfer, names):
    if isinstance(transfer, dict) and not transfer.keys() & {
        "do_remote_decode",
        "do_remote_prefill",
    }:
        transfer = compute(giver)[0] | transfer
    with pytest.raises(ValidationError, match=names):
        taker.generate(PROMPTS[:1], with_transfer(PARAMS[0], transfer), use_tqdm=False)


def test_an_engine_without_a_role_hands_nothing_over(model, giver):
    llm = LLM(model, **TINY)
    with pytest.raises(ValidationError, match="kv_producer"):
        compute(llm)
    with pytest.raises(ValidationError, match="kv_consumer"):
        go_on(llm, compute(giver))
    with pytest.raises(ValidationError, match="kv_consumer"):
        go_on(giver, compute(giver))


def test_replicas_read_the_models_files_once(model):
    plan = make_plan(EngineConfig.create(model, **TINY, kv_offloading_size=0.01))
    shared_identity(plan)
    read = identity._samples.cache_info().misses
    its = shared_identity(plan)
    assert identity._samples.cache_info().misses == read
    tokenizer = Path(model) / "tokenizer.json"
    os.utime(tokenizer, ns=(0, 0))
    assert shared_identity(plan) == its and identity._samples.cache_info().misses == read + 1


def test_each_replica_needs_a_port(secret):
    role = {"kv_role": "kv_producer", "kv_secret_file": secret, "kv_offloading_size": 1}
    EngineConfig.create("model", **role, data_parallel_size=2, kv_port=65534)
    with pytest.raises(ValidationError, match="kv_port=65534: .*each replica has one"):
        EngineConfig.create("model", **role, data_parallel_size=3, kv_port=65534)


@pytest.fixture(scope="module")
def taker(model, secret):
    return engine(model, secret, "kv_consumer")


def test_what_comes_too_late_is_not_written(model, secret):
    """Its place may be another content's by then."""
    taker = engine(model, secret, "kv_consumer")
    mover = taker.llm_engine._engine.executor.mover()
    asked = []

    class Slow:
        def ask(self, source, group, content, taken):
            asked.append(taken)

        def close(self):
            pass

    mover._others.close()
    mover._others = Slow()
    late, new, source = b"l" * 32, b"n" * 32, BlockSource("127.0.0.1", 9)
    nothing = np.empty((0, 3), np.int32)
    sent = {"stores": nothing, "contents": [], "loads": nothing, "reads": []}
    mover.send(BlockMoves(**sent | {"number": 0, "takes": [(0, 3, late, source)]}))
    stores = np.array([[0, 5, 3]], np.int32)
    mover.send(BlockMoves(**sent | {"number": 1, "stores": stores, "contents": [new]}))
    arrivals = []
    while not arrivals:
        arrivals += mover.arrived(wait=True)
    assert arrivals == [Arrival(1, 0, new, ok=True)]
    before = looked_up(mover, new)
    asked[0]([b"\1" * len(part) for part in before])
    assert list(mover.arrived(wait=True)) == [Arrival(0, 0, late, ok=False, is_of_others=True)]
    assert looked_up(mover, new) == before and looked_up(mover, late) is None


def looked_up(mover, content):
    answers = queue.Queue()
    mover.look_up(0, content, answers.put)
    return answers.get(timeout=200)
