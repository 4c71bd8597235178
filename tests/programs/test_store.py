"""What one start has compiled the next one loads, untraced; what cannot be trusted it does not."""

import logging
import os
import time
from pathlib import Path

import jax
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.programs import identity
from jaxllm.programs.compile import Program, compilation_counter
from jaxllm.runner.jax_setup import use_compilation_cache
from jaxllm.sampling.logits_processor import LogitsProcessor
from jaxllm.testing import make_tiny_checkpoint

OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "skip_tokenizer_init": True,
}
PROMPTS = [{"prompt_token_ids": list(range(1, 30))}, {"prompt_token_ids": [7, 8, 9]}]
PARAMS = [
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=12, logprobs=2),
    SamplingParams(seed=3, max_tokens=12, top_k=20, prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def cache(new_cache):
    """A cache that one start has filled; each test leaves it full."""
    before = jax.config.jax_compilation_cache_dir
    yield new_cache()
    use_compilation_cache(before)


@pytest.fixture
def warnings(caplog):
    """What the engine warns of, as text."""
    logger = logging.getLogger("jaxllm")
    logger.addHandler(caplog.handler)
    yield lambda: caplog.text
    logger.removeHandler(caplog.handler)


def start(model_dir, cache, **options):
    """Its answers, what it compiled as JAX sees it, and how much of that JAX's own cache had."""
    compiles, hits = compilation_counter.compiles, compilation_counter.cache_hits
    llm = LLM(model_dir, compilation_cache_dir=str(cache), **OPTIONS, **options)
    answers = [
        (answer.token_ids, answer.logprobs)
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        for answer in output.outputs
    ]
    return answers, compilation_counter.compiles - compiles, compilation_counter.cache_hits - hits


@pytest.fixture(scope="module")
def first(model_dir, cache):
    jax.clear_caches()  # or JAX would know the small ones from other tests of this process
    return start(model_dir, cache)


def stored(cache) -> list[Path]:
    return sorted((cache / "programs").rglob("*.pickle"))


@pytest.mark.slow
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_next_start_compiles_nothing_and_answers_the_same(
    enforce_eager, model_dir, cache, first
):
    answers, compiles, _ = first
    assert compiles == len(stored(cache)) > 4
    assert start(model_dir, cache, enforce_eager=enforce_eager) == (answers, 0, 0)


@pytest.mark.slow
def test_what_is_damaged_or_missing_is_compiled(model_dir, cache, first, warnings):
    damaged, missing, *_ = stored(cache)
    kept = damaged.read_bytes()
    damaged.write_bytes(kept[:-1] + b"?")
    missing.rename(cache / "missing")
    (cache / "programs" / "modules").rename(cache / "elsewhere")
    answers, compiles, hits = start(model_dir, cache)
    assert answers == first[0]
    # JAX's cache has them, and what is from there cannot be kept once more.
    assert compiles == hits > 0 and not missing.exists()
    assert f"is not taken from {damaged}: the file is damaged" in warnings()
    (cache / "programs" / "modules").rmdir()
    (cache / "elsewhere").rename(cache / "programs" / "modules")
    damaged.write_bytes(kept)
    (cache / "missing").rename(missing)


@pytest.mark.slow
def test_other_sources_find_the_programs_that_are_what_they_were(
    model_dir, cache, first, monkeypatch
):
    before, lowered = stored(cache), []
    lower = Program.lower
    monkeypatch.setattr(Program, "lower", lambda self: lowered.append(self.name) or lower(self))
    monkeypatch.setattr(identity, "_sources", lambda: "others")
    assert start(model_dir, cache) == (first[0], 0, 0)
    assert len(lowered) == len(before) == len(stored(cache)) - len(before)
    lowered.clear()
    assert start(model_dir, cache) == (first[0], 0, 0)
    assert not lowered
    for path in set(stored(cache)) - set(before):
        path.unlink()


@pytest.mark.slow
def test_a_program_that_no_plan_has_any_more_is_deleted(model_dir, cache, first, monkeypatch):
    modules, before = cache / "programs" / "modules", stored(cache)
    (modules / "left").write_bytes(b"of a plan that is gone")
    kept = {path.name for path in modules.iterdir()} - {"left"}
    monkeypatch.setattr(identity, "_sources", lambda: "still others")
    start(model_dir, cache, enforce_eager=True)
    assert {path.name for path in modules.iterdir()} == kept
    for path in set(stored(cache)) - set(before):
        path.unlink()


@pytest.mark.slow
def test_what_others_may_write_is_not_loaded(model_dir, cache, first, warnings):
    (cache / "programs").chmod(0o777)
    answers, compiles, hits = start(model_dir, cache)
    assert answers == first[0] and compiles == hits > 0
    assert "so nothing is loaded from there" in warnings()
    (cache / "programs").chmod(0o700)


class Processor(LogitsProcessor):
    """Somebody's code, which may change without our noticing."""

    def encode(self, params):
        return None

    def apply(self, logits, params, output_index):
        return logits


@pytest.mark.slow
def test_engines_share_a_cache_and_not_their_programs(model_dir, cache, first):
    before = stored(cache)
    old, used = cache / "programs" / "old", before[0].parent
    old.mkdir()
    os.utime(old, (0, 0))
    os.utime(used, (0, 0))
    start(model_dir, cache)
    assert time.time() - used.stat().st_mtime < 3600  # it has said that it is in use
    start(model_dir, cache, enforce_eager=True, num_gpu_blocks_override=9)
    others = set(stored(cache)) - set(before)
    assert others and all(path.parent != used for path in others)
    assert used.exists() and not old.exists()
    start(model_dir, cache, enforce_eager=True, logits_processors=[Processor])
    assert set(stored(cache)) - set(before) == others
