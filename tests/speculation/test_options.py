"""What speculative_config may be, and how everything else is refused."""

import sys

import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError
from jaxllm.plan.choose import choose_speculation
from jaxllm.speculation.drafters import make_drafter


def read(**fields):
    return EngineConfig.create("m", speculative_config=fields).speculation.read()


def test_nothing_is_the_default():
    assert EngineConfig.create("m").speculation.read() is None


def test_flags_are_short_for_fields():
    config = EngineConfig.create("m", spec_method="ngram", spec_tokens=3)
    assert config.speculation.read() == read(method="ngram", num_speculative_tokens=3)


def test_a_model_says_the_method():
    config = EngineConfig.create("m", spec_model="bundled-draft", spec_tokens=3)
    fields = {"method": "draft_model", "model": "bundled-draft", "num_speculative_tokens": 3}
    assert config.speculation.read() == read(**fields)
    neutral = {"quantization": None, "parallel_drafting": False}
    assert read(**fields, **neutral) == read(**fields)
    assert read(**fields).draft_model.model == "bundled-draft"


@pytest.mark.parametrize(
    ("fields", "lookup"),
    [
        ({}, (2, 16)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_max": 6}, (2, 6)),
        ({"prompt_lookup_min": 5}, (5, 16)),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 3}, (3, 3)),
    ],
)
def test_one_end_of_the_lookup_moves_the_other(fields, lookup):
    speculation = read(method="ngram", **fields)
    assert (speculation.min_lookup, speculation.max_lookup) == lookup


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "method=None is not supported: there are 'ngram', 'draft_model', 'mtp', 'eagle',"),
        ({"method": "medusa", "model": "x"}, "method='medusa' is not supported: only heads of"),
        ({"method": "deepseek_mtp"}, "write 'mtp', whatever the model; there are"),
        ({"method": "suffix"}, "'ngram' finds what prompt and answer repeat; there are"),
        ({"method": "eagle3"}, "model=None is not supported: 'eagle3' needs the directory"),
        ({"method": "mtp", "model": "x"}, "model='x' is not supported: 'mtp' has method"),
        ({"method": "custom_class", "model": "x"}, "needs a drafter as 'module:Class'"),
        ({"method": "draft_model"}, "model=None is not supported: 'draft_model' needs"),
        ({"model": "x", "prompt_lookup_max": 3}, "prompt_lookup_max=3 is not supported: 'draft_"),
        ({"model": "x", "quantization": "fp8"}, "quantization='fp8' is not supported: give"),
        ({"model": "x", "draft_sample_method": "greedy"}, "is sampled as its request is"),
        ({"model": "x", "rejection_sample_method": "block"}, "a draft is accepted if it equals"),
        ({"model": "x", "parallel_drafting": True}, "the draft makes one token after the other"),
        ({"model": "x", "max_model_len": 0}, "max_model_len=0 is not supported: give at least 1"),
        ({"model": "x", "draft_tensor_parallel_size": 2}, "tensor_parallel_size=1"),
        ({"method": 3}, "method=3 is not supported"),
        ({"method": ["ngram"]}, "is not supported"),
        ({"method": "ngram", "model": "x"}, "model='x' is not supported"),
        ({"method": "ngram", "ngrams": 2}, "ngrams=2 is not supported"),
        ({"method": "ngram", "num_speculative_tokens": 8}, "give 1 to 7"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "give 1 to 7"),
        ({"method": "ngram", "num_speculative_tokens": True}, "give 1 to 7"),
        ({"method": "ngram", "prompt_lookup_max": 17}, "give 1 to 16"),
        ({"method": "ngram", "prompt_lookup_max": "4"}, "give 1 to 16"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min=4 is not supported: prompt_lookup_max=3",
        ),
    ],
)
def test_other_fields_and_values_are_refused_by_name(fields, message):
    with pytest.raises(ValidationError) as refusal:
        read(**fields)
    assert message in str(refusal.value)
    assert refusal.value.parameter == "speculative_config"


def test_heads_are_asked_for():
    assert read(method="mtp").head.model is None and read(method="mtp").num_drafts == 1
    head = read(method="eagle3", model="x", revision="main").head
    assert (head.model, head.revision) == ("x", "main")
    assert not read(method="eagle", model="x").proposes and read(method="ngram").proposes


class Silent:
    """A drafter that knows nothing."""

    def __init__(self, speculation):
        self.num_drafts = speculation.num_drafts

    def abstract(self, num_slots, max_model_len): ...
    def admit(self, state, slot, tokens): ...
    def record(self, state, tokens, num_tokens, slots, ends): ...
    def propose(self, state, num_drafts, slots, ends): ...


class Unfinished:
    def __init__(self, speculation): ...
    def abstract(self, num_slots, max_model_len): ...


def test_a_class_of_a_user_drafts(monkeypatch):
    fields = {"method": "custom_class", "num_speculative_tokens": 2}
    monkeypatch.setitem(sys.modules, "drafters_of_user", sys.modules[__name__])
    drafter = make_drafter(read(model="drafters_of_user:Silent", **fields))
    assert isinstance(drafter, Silent) and drafter.num_drafts == 2
    for name, message in (
        ("drafters_of_user:Unfinished", "a drafter has a function admit"),
        ("drafters_of_user:Missing", "it cannot be made (AttributeError"),
        ("no_such_module:Drafter", "it cannot be made (ModuleNotFoundError"),
    ):
        with pytest.raises(ValidationError, match="model='") as refusal:
            make_drafter(read(model=name, **fields))
        assert message in str(refusal.value)


@pytest.mark.parametrize(
    "ranges",
    [[[2, 4, 3]], [[1, 4, 3], [6, 8, 1]], [[1, 4, 9]], [[1, 0, 3]], [[1, 4, 0]], [1], 3, [[1, 2]]],
)
def test_ranges_with_gaps_are_refused(ranges):
    with pytest.raises(ValidationError, match="num_speculative_tokens_per_batch_size"):
        read(method="ngram", num_speculative_tokens_per_batch_size=ranges)


def test_drafts_by_the_number_of_requests():
    ranges = [[1, 2, 4], [3, 5, 2], [6, 90, 0]]
    speculation = read(method="ngram", num_speculative_tokens_per_batch_size=ranges)
    assert speculation.drafts_by_requests == (4, 4, 2, 2, 2)
    assert speculation.max_rows == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: a pipeline does not speculate"),
        ({"spec_tokens": 2}, "spec_tokens=2: speculative_config has num_speculative_tokens=3"),
        ({"spec_method": "eagle"}, "spec_method='eagle': speculative_config has method='ngram'"),
        ({"spec_model": "x"}, "model='x' is not supported: 'ngram' has"),
    ],
)
def test_what_contradicts_it_is_refused(options, message):
    fields = {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(ValidationError) as refusal:
        EngineConfig.create("m", speculative_config=fields, **options)
    assert message in str(refusal.value)


def test_the_plan_gives_drafts_to_few_requests():
    config = EngineConfig.create("m", spec_method="ngram", spec_tokens=3)
    chosen = choose_speculation(config, "tpu", 256, 2048)
    assert set(chosen.drafts_by_requests) == {3}
    assert 16 <= chosen.max_rows <= 128
    assert choose_speculation(config, "tpu", 2, 2048).max_rows == 2
    with pytest.raises(ValidationError, match="max_num_batched_tokens=7"):
        choose_speculation(config, "tpu", 2, 7)
