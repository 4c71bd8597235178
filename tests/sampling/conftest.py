"""Drives the sampler as the runner does, without the runner."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.native.library import NoLibrary, load
from jaxllm_kernels.sampler.native import NativeSampler

from jaxllm.sampling import row_params
from jaxllm.sampling.layout import LAYOUTS, Layout, with_op
from jaxllm.sampling.sampler import SampleOutput, sample
from jaxllm.sampling.slot_state import SlotState, slot_row, write_slot
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.schedule import Admission

NUM_LOGPROBS = 4
MAX_MODEL_LEN = 100_000


@functools.cache
def _program(processors, layout):
    def step(logits, packed, slots, samples, output_index, positions, state, masks):
        return sample(
            logits,
            row_params.decode(packed, processors),
            slots=slots,
            samples=samples,
            output_index=output_index,
            positions=positions,
            state=state,
            num_logprobs=NUM_LOGPROBS,
            layout=layout,
            processors=processors,
            masks=masks,
        )

    return jax.jit(step, donate_argnames="state")


_write_slot = jax.jit(write_slot, donate_argnums=0)


class SamplerDriver:
    """Slots with requests. Tables start with garbage, as from earlier requests."""

    layout = LAYOUTS["cpu"]

    def __init__(self, vocab_size: int, num_slots: int, processors: tuple = ()):
        self.vocab_size, self.num_slots, self.processors = vocab_size, num_slots, processors
        rng = np.random.default_rng(99)
        self.state = jax.tree.map(
            lambda leaf: jnp.asarray(rng.integers(0, 9, leaf.shape).astype(leaf.dtype)),
            SlotState.abstract(num_slots, vocab_size, MAX_MODEL_LEN),
        )
        columns = row_params.num_columns(processors)
        self.columns = np.zeros((num_slots, columns), np.int32)
        self.num_outputs = np.zeros(num_slots, np.int32)
        self.lengths = np.zeros(num_slots, np.int32)

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int = 0,
        prompt: Sequence[int] = (0,),
        output: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        admission = Admission(
            slot=slot,
            sampling_params=params,
            seed=seed,
            stop_token_ids=list(stop_ids),
            bad_word_ids=[list(word) for word in bad_words],
            prompt_token_ids=list(prompt),
            output_token_ids=list(output),
        )
        self.columns[slot] = row_params.encode(params, seed, self.processors)
        self.num_outputs[slot] = len(output)
        self.lengths[slot] = len(prompt) + len(output)
        row = slot_row(admission, self.vocab_size, MAX_MODEL_LEN)
        if row is not None:
            self.state = _write_slot(self.state, np.int32(slot), row)

    def step(
        self,
        logits,
        slots,
        *,
        num_rows: int | None = None,
        samples=None,
        positions=None,
        masks=None,
    ) -> SampleOutput:
        """Sample a token for each slot from logits, [n, V], of those in its mask, bool [n, V].
        Return n rows of numpy arrays."""
        n = len(slots)
        num_rows = num_rows or n
        samples = np.ones(n, bool) if samples is None else np.asarray(samples)

        def pad(x, fill: float = 0):
            x = np.asarray(x)
            return np.concatenate([x, np.full((num_rows - n, *x.shape[1:]), fill, x.dtype)])

        words = None
        if masks is not None:
            padded = np.pad(np.asarray(masks, bool), ((0, 0), (0, -self.vocab_size % 32)))
            words = pad(np.packbits(padded, axis=1, bitorder="little").view("<u4"))
        slots = np.asarray(slots, np.int32)
        output = _program(self.processors, self.layout)(
            pad(np.asarray(logits, np.float32), np.nan),
            pad(self.columns[slots]),
            pad(slots, self.num_slots),
            pad(samples),
            pad(self.num_outputs[slots]),
            pad(self.lengths[slots] if positions is None else positions),
            self.state,
            words,
        )
        self.state = output.state
        self.num_outputs[slots] += samples
        self.lengths[slots] += samples
        tokens, is_valid, logprobs = jax.tree.map(
            lambda x: np.asarray(x)[:n], (output.tokens, output.is_valid, output.logprobs)
        )
        return SampleOutput(tokens, is_valid, self.state, logprobs)


@pytest.fixture(scope="session")
def native_layout(native_kernels_dir) -> Layout:
    """The layout with the native sampler."""
    library = load(native_kernels_dir, ("float32",))
    if isinstance(library, NoLibrary):
        pytest.skip(library.reason)
    return with_op(LAYOUTS["cpu"], NativeSampler.load(library))


@pytest.fixture(params=["cpu", "native"])
def driver(request) -> type[SamplerDriver]:
    """The driver, by XLA and by the native sampler, or with layouts of `of_layouts`."""
    layout = request.param
    if isinstance(layout, str):
        native = layout == "native"
        layout = request.getfixturevalue("native_layout") if native else LAYOUTS[layout]
    return type("Driver", (SamplerDriver,), {"layout": layout})


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
