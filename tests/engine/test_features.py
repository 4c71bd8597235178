"""A feature joins an engine through the two lists, with a half on each side, and disturbs nobody.

The one that is made up here brings, for each row of its requests that samples, the token with the
largest logit. Its requests are greedy, so it must be the token that the step has sampled. It is in
all programs, those for decodes too.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.engine.core import host_features
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, device_features, make_packer, num_programs
from jaxllm.scheduler.features import Drafted
from jaxllm.scheduler.request import Request
from jaxllm.testing import make_tiny_checkpoint

NAME = "best"
USING = 7  # the top_k of requests that use it, which greedy ones ignore
NOT_WANTED = -1

PROMPTS = [[5, 6, 7], [8] * 40, [9, 10], [5, 6, 7, 11, 12, 13, 14, 15, 16]]
OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "num_gpu_blocks_override": 24,
    "check_invariants": True,
}


class BestOnHost:
    name = NAME

    def __init__(self):
        self.using: set[str] = set()
        self.bars = False  # whether its requests compute their prompts themselves
        self.corrupts = False  # whether it finds that what has been computed is no numbers
        self.holds = False  # whether its requests wait until nothing else can run
        self.held: list[Request] = []
        self.ends = ""  # what becomes of its requests with their first token
        self.most_at_once = 1000
        self.brought: list[tuple[int, list[int]]] = []  # the token, and those of the output

    def add(self, request):
        if request.sampling_params.top_k == USING:
            self.using.add(request.request_id)
            request.num_cache_bars += self.bars
            if self.holds:
                request.num_holds += 1
                self.held.append(request)

    def ready(self, *, wait):
        ready, self.held = (self.held, []) if wait else ([], self.held)
        return ready

    def drop(self, request):
        self.using.discard(request.request_id)

    def lose(self):
        pass

    def start_over(self, request):
        pass

    def limit(self, request, n, budget):
        return min(n, self.most_at_once) if request.request_id in self.using else n

    def draft(self, rows, num_tokens):
        last = np.cumsum(num_tokens, dtype=np.int32) - 1
        wanted = [
            r.request_id in self.using and r.num_computed_tokens == r.num_tokens for r in rows
        ]
        if not any(wanted):
            return None
        places = np.where(wanted, last, NOT_WANTED).astype(np.int32)
        return Drafted({"places": places}, needs_mixed=False, wants_logits=False)

    def read(self, schedule, result, rows):
        tokens = result.slices[NAME]["tokens"].tolist()
        places = schedule.slices[NAME]["places"].tolist()
        found = {
            row: tokens[row]
            for row, request in enumerate(rows)
            if request is not None and places[row] != NOT_WANTED
        }
        return SimpleNamespace(
            rows=found,
            corrupted=set(found) if self.corrupts else (),
            failed=dict.fromkeys(found, "it is not wanted") if self.ends == "failed" else {},
            complete=set(found) if self.ends == "complete" else (),
            add_to=lambda output, row: self.brought.append((found[row], output.new_token_ids)),
        )


class BestOnDevice:
    name = NAME

    def fields(self, bucket):
        return {"places": (bucket.num_rows,)}

    def pack(self, fields, its):
        fields["places"][...] = NOT_WANTED
        if its is not None:
            fields["places"][: len(its["places"])] = its["places"]

    def compute(self, fields, model, hidden):
        places = fields["places"]

        def compute():
            logits = model.compute_logits(hidden[jnp.maximum(places, 0)])
            return {"tokens": jnp.argmax(logits, axis=1).astype(jnp.int32)}

        def skip():
            return {"tokens": jnp.zeros(len(places), jnp.int32)}

        return jax.lax.cond(jnp.any(places != NOT_WANTED), compute, skip)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def join():
    """Puts a feature on the two lists, and returns its host half."""

    def join(patch):
        feature = BestOnHost()
        patch.setattr(
            "jaxllm.engine.core.host_features",
            lambda info, kv: (*host_features(info, kv), feature),
        )
        patch.setattr(
            "jaxllm.programs.declare.device_features",
            lambda plan: (*device_features(plan), BestOnDevice()),
        )
        return feature

    return join


@pytest.fixture(scope="module")
def plain(model):
    return LLM(model, **OPTIONS)


@pytest.fixture(scope="module")
def joined(model, join, new_cache):
    """An engine with the feature, and the feature. Nobody else may have either, or find these
    programs, which are kept by what sources say."""
    with pytest.MonkeyPatch.context() as patch:
        feature = join(patch)
        return LLM(model, compilation_cache_dir=str(new_cache()), **OPTIONS), feature


@pytest.fixture
def feature(joined):
    llm, feature = joined
    llm.reset_prefix_cache()
    feature.brought, feature.bars, feature.corrupts = [], False, False
    feature.holds, feature.ends = False, ""
    feature.most_at_once = 1000
    yield feature
    assert not feature.using, "a request that has ended was not dropped"


def params_of(uses, **others):
    options = {"temperature": 0, "max_tokens": 9, "ignore_eos": True, **others}
    return [SamplingParams(**options, top_k=USING if its else 0) for its in uses]


def tokens_of(llm, params):
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_the_two_lists_name_the_same_features(model):
    config = EngineConfig.create(model=model, **OPTIONS)
    plan = make_plan(config)
    on_device = [feature.name for feature in device_features(plan)]
    kv = None  # only an engine that takes blocks over asks for it
    assert [feature.name for feature in host_features(plan.info(), kv)] == on_device
    assert len(set(on_device)) == len(on_device) > 0


def test_its_requests_get_what_it_computes(joined, feature, plain):
    llm, _ = joined
    uses = [True, True, False, True]
    expected = tokens_of(plain, params_of(uses))
    assert tokens_of(llm, params_of(uses)) == expected
    # A prompt of several chunks brings something only with its last.
    assert len(feature.brought) == sum(map(len, (expected[0], expected[1], expected[3])))
    assert all([token] == its for token, its in feature.brought)


def test_those_that_do_not_use_it_get_the_same_tokens(joined, feature, plain):
    llm, _ = joined
    params = params_of([False] * 4, temperature=0.8, seed=3, prompt_logprobs=1)
    assert tokens_of(llm, params) == tokens_of(plain, params)
    assert feature.brought == []


def test_it_adds_no_program_and_nothing_is_compiled_later(joined, feature, model, join):
    llm, _ = joined
    plan = make_plan(EngineConfig.create(model=model, **OPTIONS))
    without = declare_programs(plan, make_packer(plan).layouts)
    with pytest.MonkeyPatch.context() as patch:
        join(patch)
        layouts = make_packer(plan).layouts
        its = declare_programs(plan, layouts)
    assert all(NAME in [f.name for f in layout.features] for layout in layouts.values())
    assert its.keys() == without.keys() and len(its) == num_programs(plan)
    tokens_of(llm, params_of([True, False, True, False], prompt_logprobs=2))
    assert llm.llm_engine.stats().num_compiles_after_warmup == 0


@pytest.mark.parametrize(("bars", "cached"), [(False, 32), (True, 0)])
def test_it_may_want_prompts_to_be_computed(joined, feature, bars, cached):
    llm, _ = joined
    feature.bars = bars
    [params] = params_of([True])
    for expected in (0, cached):
        [output] = llm.generate(PROMPTS[1:2], params, use_tqdm=False)
        assert output.num_cached_tokens == expected


def test_it_may_limit_how_much_its_requests_compute(joined, feature, plain):
    llm, _ = joined

    def num_steps(uses):
        llm.reset_prefix_cache()
        before = llm.llm_engine.stats().num_steps
        [output] = llm.generate(PROMPTS[1:2], params_of([uses]), use_tqdm=False)
        [expected] = plain.generate(PROMPTS[1:2], params_of([uses]), use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        return llm.llm_engine.stats().num_steps - before

    feature.most_at_once = 4
    # 40 tokens of the prompt in 10 chunks, and not in 3 of 16.
    assert num_steps(True) - num_steps(False) == 7


def test_it_may_hold_its_requests_back(joined, feature, plain):
    llm, _ = joined
    feature.holds = True
    uses = [True, True, False, True]
    expected = tokens_of(plain, params_of(uses))
    for i, params in enumerate(params_of(uses)):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": PROMPTS[i]}, params)
    finished = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            finished[output.request_id] = output.outputs[0].token_ids
    assert list(finished)[0] == "2", "it does not hold this one"
    assert [finished[str(i)] for i in range(4)] == expected


@pytest.mark.parametrize(
    ("ends", "reason", "num_tokens"), [("complete", "stop", 1), ("failed", "error", 0)]
)
def test_it_may_end_its_requests(joined, feature, plain, ends, reason, num_tokens):
    llm, _ = joined
    feature.ends = ends
    params = params_of([False, True, False, True])
    expected = tokens_of(plain, params)
    answers = [one.outputs[0] for one in llm.generate(PROMPTS, params, use_tqdm=False)]
    for i in (1, 3):
        assert answers[i].finish_reason == reason
        assert answers[i].token_ids == expected[i][:num_tokens]
    for i in (0, 2):
        assert answers[i].finish_reason == "length" and answers[i].token_ids == expected[i]


def test_a_row_that_it_calls_corrupted_ends_alone(joined, feature, plain):
    llm, _ = joined
    feature.corrupts = True
    params = params_of([False, True, False, False])
    expected = tokens_of(plain, params)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "length", "length"]
    for i in (0, 2, 3):
        assert outputs[i].outputs[0].token_ids == expected[i]
    assert feature.brought == []
