import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError
from jaxllm.sampling import row_params
from jaxllm.sampling.logits_processor import LogitsProcessor, load_logits_processors
from jaxllm.sampling_params import SamplingParams

VOCAB = 50
SLOTS = 8
CONFIG = EngineConfig.create("some-model")


class ForceToken(LogitsProcessor):
    """Forces a token from some output position on."""

    num_params = 2

    def encode(self, params):
        force = (params.extra_args or {}).get("force")
        if force is None:
            return None
        if force["token"] < 0:
            raise ValueError(f"force: token {force['token']} is negative")
        return force["token"], force["after"]

    def apply(self, logits, params, output_index):
        token, after = params[:, :1], params[:, 1]
        forced = jnp.where(jnp.arange(logits.shape[1]) == token, 0.0, -jnp.inf)
        return jnp.where((output_index >= after)[:, None], forced, logits)


class Sharpen(LogitsProcessor):
    """Multiplies the logits, with a number per request."""

    num_params = 1

    def encode(self, params):
        factor = (params.extra_args or {}).get("sharpen")
        return None if factor is None else [factor]

    def apply(self, logits, params, output_index):
        return logits * params


class Miscounts(ForceToken):
    num_params = 1


@pytest.fixture(scope="module")
def processors():
    return load_logits_processors((ForceToken, Sharpen), CONFIG)


def test_a_request_gets_its_processor_and_the_others_do_not(driver, rng, processors):
    sampler = driver(VOCAB, SLOTS, processors)
    force = {"token": 17, "after": 2}
    sampler.admit(0, SamplingParams(temperature=0, extra_args={"force": force}))
    sampler.admit(1, SamplingParams(temperature=0))
    sampler.admit(2, SamplingParams(temperature=0, extra_args={"sharpen": -1.0}))
    both = {"sharpen": 2.0, "force": {"token": 3, "after": 0}}
    sampler.admit(3, SamplingParams(temperature=1.0, extra_args=both))
    logits = rng.normal(0, 3, (4, VOCAB))
    logits[3, 3] = -50
    tokens = np.stack(
        [sampler.step(logits, range(4), num_rows=SLOTS).tokens for _ in range(4)], axis=1
    )
    best = logits.argmax(axis=1)
    assert tokens[0].tolist() == [best[0], best[0], 17, 17]
    assert tokens[1].tolist() == [best[1]] * 4
    assert tokens[2].tolist() == [logits[2].argmin()] * 4
    assert tokens[3].tolist() == [3] * 4


def test_processors_come_before_penalties(driver, processors):
    sampler = driver(VOCAB, SLOTS, processors)
    # Sharpened first, the gap of 2 becomes 4, and a penalty of 3 in all does not close it.
    params = SamplingParams(
        temperature=0, presence_penalty=1, frequency_penalty=2, extra_args={"sharpen": 2.0}
    )
    sampler.admit(0, params, output=[5])
    logits = np.zeros((1, VOCAB))
    logits[0, 5] = 2
    tokens = [int(sampler.step(logits, [0], num_rows=SLOTS).tokens[0]) for _ in range(2)]
    assert tokens == [5, 0]


def test_the_columns_of_processors_follow_those_of_the_sampler(processors):
    assert row_params.num_columns(processors) == row_params.NUM_PARAMS + 3
    assert len(row_params.encode(SamplingParams(), 0, processors)) == row_params.NUM_PARAMS + 3


def test_a_processor_may_refuse_a_request(processors):
    params = SamplingParams(extra_args={"force": {"token": -1, "after": 0}})
    with pytest.raises(ValueError, match="negative"):
        row_params.encode(params, 0, processors)


def test_a_wrong_number_of_parameters_is_refused():
    params = SamplingParams(extra_args={"force": {"token": 1, "after": 0}})
    with pytest.raises(ValueError, match="Miscounts.encode returned 2 numbers.*num_params is 1"):
        row_params.encode(params, 0, load_logits_processors((Miscounts,), CONFIG))


class Raises(LogitsProcessor):
    num_params = 1

    def encode(self, params):
        return params.extra_args["missing"]


@pytest.mark.parametrize(
    ("extra_args", "why"),
    [({}, "Raises.encode: KeyError: 'missing'"), ({"missing": 5}, "Raises.encode must return")],
)
def test_whatever_a_processor_raises_is_a_refusal_with_its_name(extra_args, why):
    processors = load_logits_processors((Raises,), CONFIG)
    with pytest.raises(ValueError, match=why):
        row_params.encode(SamplingParams(extra_args=extra_args), 0, processors)


@pytest.mark.parametrize(
    ("change", "returned"),
    [
        (lambda logits: logits[0], r"returned float32\[50\]"),
        (lambda logits: logits[:, :1], r"returned float32\[8, 1\]"),
        (lambda logits: logits.astype(jnp.bfloat16), "returned bfloat16"),
        (lambda logits: None, "returned a NoneType"),
    ],
)
def test_a_processor_must_return_logits_as_it_got_them(driver, change, returned):
    class Changes(LogitsProcessor):
        def apply(self, logits, params, output_index):
            return change(logits)

        def encode(self, params):
            return None

    sampler = driver(VOCAB, SLOTS, (Changes(CONFIG),))
    with pytest.raises(ValidationError, match="Changes.apply must return.*" + returned):
        sampler.step(np.zeros((1, VOCAB)), [0], num_rows=SLOTS)


def test_processors_are_found_by_name():
    (processor,) = load_logits_processors(
        ("jaxllm.sampling.logits_processor:LogitsProcessor",), CONFIG
    )
    assert type(processor) is LogitsProcessor and processor.config is CONFIG


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("jaxllm.sampling", "module:Class"),
        ("no.such.module:Class", "cannot be imported"),
        ("jaxllm.sampling.logits_processor:Missing", "cannot be imported"),
        ("jaxllm.config:EngineConfig", "subclass of jaxllm.LogitsProcessor"),
        (dict, "subclass of jaxllm.LogitsProcessor"),
    ],
)
def test_other_names_are_refused(spec, why):
    with pytest.raises(ValidationError, match=why):
        load_logits_processors((spec,), CONFIG)


def test_too_many_processors_are_refused():
    with pytest.raises(ValidationError, match="at most 8"):
        load_logits_processors((ForceToken,) * 9, CONFIG)
