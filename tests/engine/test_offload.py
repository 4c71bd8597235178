"""With a second home for KV blocks an engine answers as without: to the bit, whatever is preempted,
evicted, aborted, slept or restarted in between."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams, ValidationError
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

# Blocks for hardly more than one of four running requests.
FEW = TINY | {"num_gpu_blocks_override": 10, "check_invariants": True}
HOST = {"kv_offloading_size": 0.002}


def prompt(index, length=40):
    return [3 + (index * 131 + i * i * 7 + i) % 380 for i in range(length)]


PROMPTS = [prompt(index, 30 + 4 * index) for index in range(6)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, logprobs=2),
    SamplingParams(seed=1, max_tokens=50, ignore_eos=True, logprobs=2),
    SamplingParams(seed=2, temperature=0.7, top_k=20, max_tokens=40, logprobs=2),
] * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


def generate(llm, prompts=PROMPTS, params=PARAMS):
    return answers(llm.generate(prompts, params, use_tqdm=False))


def answers(outputs):
    return [
        (
            answer.token_ids,
            [{token: its.logprob for token, its in at.items()} for at in answer.logprobs],
            answer.finish_reason,
        )
        for output in outputs
        for answer in output.outputs
    ]


@pytest.fixture(scope="module")
def expected(model):
    """Alone in a cache for all."""
    return generate(LLM(model, **TINY))


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, **FEW, **HOST)


def stats(llm):
    return llm.llm_engine.stats()


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_changes_no_bit(model, expected, overlap):
    llm = LLM(model, **FEW, **HOST, async_scheduling=overlap)
    assert generate(llm) == expected
    its = stats(llm)
    assert its.num_preemptions > 2 and its.host_blocks_loaded > 2
    # Nearly nothing is computed again: of a preempted request less than a block and a token.
    least = sum(map(len, PROMPTS)) + sum(len(tokens) - 1 for tokens, _, _ in expected)
    # Overlap computes a token too much where a stop ends a request.
    assert its.num_scheduled_tokens <= least + len(PROMPTS) + 17 * its.num_preemptions
    assert its.num_requests_swapped == 0
    assert {its.host_blocks_dropped, its.host_blocks_read} == {0}


@pytest.mark.sweep
def test_latents_come_back_from_the_host(tmp_path):
    model = str(make_tiny_checkpoint(tmp_path, "deepseek_v3"))
    enough = generate(LLM(model, **TINY))
    llm = LLM(model, **FEW, **HOST)
    assert generate(llm) == enough
    figures = stats(llm)
    assert figures.num_preemptions > 2 and figures.host_blocks_loaded > 2


def test_nothing_compiles_after_the_start(model, expected):
    llm = LLM(model, **FEW | {"enforce_eager": False}, **HOST)
    assert generate(llm) == expected
    assert stats(llm).host_blocks_loaded and not stats(llm).num_compiles_after_warmup


def test_a_prefix_comes_back_from_the_host(llm, expected):
    assert generate(llm) == expected
    before = stats(llm)
    assert generate(llm) == expected
    found = stats(llm).external_cache_hits - before.external_cache_hits
    assert found >= 32 and found % 16 == 0
    metrics = {metric.name.partition(":")[2]: metric for metric in llm.get_metrics()}
    assert metrics["external_prefix_cache_hits"].value == stats(llm).external_cache_hits
    assert metrics["kv_offload_blocks_used"].value > 10
    # Salts are in the hashes: nobody finds another one's blocks.
    before = stats(llm)
    salted = [{"prompt_token_ids": its, "cache_salt": "mine"} for its in PROMPTS]
    assert generate(llm, salted) == expected
    assert stats(llm).external_cache_hits == before.external_cache_hits
    llm.reset_prefix_cache()
    assert stats(llm).num_blocks_used == 0
    assert generate(llm) == expected
    assert stats(llm).external_cache_hits == before.external_cache_hits


def test_aborts_while_blocks_move_cost_nobody_anything(llm, expected):
    engine = llm.llm_engine
    for round in range(6):
        kept = {}
        for index, (ids, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(f"{round}-{index}", {"prompt_token_ids": ids}, params)
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    kept[output.request_id] = output
            steps += 1
            if steps % 9 == round:
                engine.abort_request([f"{round}-{(steps // 9 + round) % len(PROMPTS)}"])
        done = {int(name.partition("-")[2]): its for name, its in kept.items()}
        for index, output in done.items():
            if output.outputs[0].finish_reason != "abort":
                assert answers([output]) == [expected[index]]
    assert stats(llm).num_blocks_used == 0


def test_the_host_keeps_blocks_while_the_engine_sleeps(llm, expected):
    generate(llm)
    before = stats(llm)
    llm.sleep(level=1)
    llm.wake_up()
    assert generate(llm) == expected
    assert stats(llm).external_cache_hits > before.external_cache_hits
    # Other weights may come back from level 2.
    llm.sleep(level=2)
    llm.wake_up()
    before = stats(llm)
    assert generate(llm, PROMPTS[:1], PARAMS[0]) == expected[:1]
    assert stats(llm).external_cache_hits == before.external_cache_hits


def test_windows_have_pools_of_their_own(tmp_path):
    model = make_tiny_checkpoint(
        tmp_path,
        "qwen2",
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
        num_key_value_heads=1,
    )
    windows = {"kv_cache_request_len": 48}
    expected = generate(LLM(model, **TINY, **windows))
    llm = LLM(model, **FEW, **windows, **HOST)
    assert generate(llm) == expected
    assert generate(llm) == expected
    assert len(llm.llm_engine.info.host_places) == 2
    assert stats(llm).host_blocks_loaded and stats(llm).external_cache_hits


def test_a_restart_finds_the_files(model, expected, tmp_path):
    options = {**FEW, **HOST, "kv_offloading_path": str(tmp_path / "blocks")}

    def start():
        return LLM(model, **options)

    first = start()
    assert generate(first) == expected
    with pytest.raises(ValidationError, match="level=2"):
        first.sleep(level=2)
    first.llm_engine.shutdown()
    files = sorted((tmp_path / "blocks").glob("*.kv"))
    # The full blocks of all prompts and answers.
    assert len(files) == sum(
        (len(ids) + len(tokens) - 1) // 16
        for ids, (tokens, _, _) in zip(PROMPTS, expected, strict=True)
    )
    second = start()
    assert generate(second) == expected
    assert stats(second).external_cache_hits == sum((len(ids) - 1) // 16 * 16 for ids in PROMPTS)
    assert stats(second).host_blocks_read > 8
    second.llm_engine.shutdown()
    # What is damaged is computed.
    for path in files:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    third = start()
    assert generate(third, PROMPTS[:2], PARAMS[:2]) == expected[:2]
    assert stats(third).external_cache_hits == 0 and stats(third).host_blocks_dropped
    third.reset_prefix_cache()
    assert not list((tmp_path / "blocks").glob("*.kv"))
    third.llm_engine.shutdown()


def test_blocks_reach_the_disk_while_the_engine_is_idle(model, tmp_path):
    llm = LLM(model, **FEW, **HOST, kv_offloading_path=str(tmp_path / "blocks"))
    llm.generate([prompt(0, 40)], SamplingParams(max_tokens=1), use_tqdm=False)
    until = time.monotonic() + 200
    while len(list((tmp_path / "blocks").glob("*.kv"))) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(list((tmp_path / "blocks").glob("*.kv"))) == 2
    llm.llm_engine.shutdown()


ENDS = """
import json, os, sys, time
from jaxllm import LLM, SamplingParams
model, prompts, options = json.loads(sys.argv[1])
fsync = os.fsync
os.fsync = lambda file: (time.sleep(0.05), fsync(file))  # a disk that is slower than the engine
llm = LLM(model, **options)
llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
"""


def test_a_script_that_simply_ends_leaves_all_its_blocks(model, tmp_path):
    options = {**TINY, **HOST, "kv_offloading_path": str(tmp_path / "blocks")}
    said = json.dumps([model, PROMPTS, options])
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", ENDS, said], check=True, timeout=300, cwd=root)
    llm = LLM(model, **options)
    for ids in PROMPTS:
        (output,) = llm.generate([ids], SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.num_cached_tokens == (len(ids) - 1) // 16 * 16
    llm.shutdown()


@pytest.mark.parametrize("inside", [".", "blocks/of/mine"])
def test_files_in_the_models_directory_are_refused(model, inside):
    path = Path(model) / inside
    message = rf"kv_offloading_path='{path}': it is in the model's directory, {model}: .*outside"
    with pytest.raises(ValidationError, match=message):
        LLM(model, **TINY, **HOST, kv_offloading_path=str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": 0.0}, r"kv_offloading_size=0.0: give a number of GiB above 0"),
        ({"kv_offloading_size": 1e-6}, r"kv_offloading_size=1e-06: .*give at least 0\.00"),
        ({"kv_offloading_path": "x"}, r"kv_offloading_path='x': .*give kv_offloading_size"),
        (HOST | {"enable_prefix_caching": False}, r"leave enable_prefix_caching on"),
        (HOST | {"kv_offloading_backend": "lmcache"}, r"'lmcache' is not one of 'native'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(model, options, message):
    with pytest.raises(ValidationError, match=message):
        LLM(model, **TINY | options)


STATES = {"dtype": "float32", "mamba_block_size": 16}


def assert_alike(answers, expected):
    """What a preempted request computes again, it computes in chunks, which have other last bits
    than decodes. `test_batch_invariant.py` compares bits."""
    for (tokens, logprobs, reason), its in zip(answers, expected, strict=True):
        assert (tokens, reason) == (its[0], its[2])
        for at, other in zip(logprobs, its[1], strict=True):
            assert at == pytest.approx(other, abs=1e-3)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("recurrent"), "qwen3_next"))


def test_snapshots_of_states_come_back_from_host_and_files(recurrent, tmp_path):
    """There are snapshots for fewer prefixes than there are requests."""
    expected = generate(LLM(recurrent, **TINY | STATES))
    options = FEW | STATES | {"num_state_snapshots": 4, "kv_offloading_size": 0.02}
    options |= {"kv_offloading_path": str(tmp_path / "blocks")}
    llm = LLM(recurrent, **options)
    assert_alike(generate(llm), expected)
    its = stats(llm)
    assert its.num_preemptions > 2 and its.host_blocks_loaded > 2
    least = sum(map(len, PROMPTS)) + sum(len(tokens) - 1 for tokens, _, _ in expected)
    # Of a preempted request what is behind its last snapshot is computed again.
    assert its.num_scheduled_tokens <= least + len(PROMPTS) + 17 * its.num_preemptions
    found = its.external_cache_hits
    assert_alike(generate(llm), expected)
    assert stats(llm).external_cache_hits > found
    llm.llm_engine.shutdown()
    again = LLM(recurrent, **options)
    assert_alike(generate(again), expected)
    assert stats(again).host_blocks_read and stats(again).external_cache_hits > 100
    again.llm_engine.shutdown()


def test_a_restart_goes_on_from_a_prompts_own_last_snapshot(recurrent, tmp_path):
    """Its answer has passed it, and a running engine has it still."""
    options = TINY | STATES | {"num_state_snapshots": 24, "kv_offloading_size": 0.02}
    options |= {"kv_offloading_path": str(tmp_path / "blocks")}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)

    def run(llm):
        outputs = [
            llm.generate([prompt(length, length)], params, use_tqdm=False)[0]
            for length in (40, 48, 49)
        ]
        return answers(outputs), [one.num_cached_tokens for one in outputs]

    llm = LLM(recurrent, **options)
    expected, found = run(llm)
    assert found == [0, 0, 0]
    llm.shutdown()
    again = LLM(recurrent, **options)
    restarted = run(again)
    assert run(again) == restarted == (expected, [32, 32, 48])
    again.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_state_snapshots": 0}, "kv_offloading_size=0.02: .*raise num_state_snapshots"),
        ({"kv_role": "kv_both", "kv_secret_file": "key"}, "kv_role='kv_both': .*recurrent"),
    ],
)
def test_what_states_do_not_have_is_refused_by_name(recurrent, tmp_path, options, message):
    if "kv_secret_file" in options:
        (tmp_path / "key").write_text("a" * 40)
        (tmp_path / "key").chmod(0o600)
        options = options | {"kv_secret_file": str(tmp_path / "key")}
    with pytest.raises(ValidationError, match=message):
        LLM(recurrent, **TINY | {"kv_offloading_size": 0.02} | options)
