"""The emulator of TPUs finds races as well when Python is called cheaply (tests/emulator.py)."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.emulator import ordered


@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_that_reads_before_its_copy_has_arrived_is_found(waits):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    def kernel(x, out, buffer, semaphore, *, waits):
        copy = pltpu.make_async_copy(x, buffer, semaphore)
        copy.start()
        if waits:
            copy.wait()
        out[...] = buffer[...]
        if not waits:
            copy.wait()

    copy = functools.partial(
        pl.pallas_call,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait"),
    )
    given = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
    copied = jax.jit(copy(functools.partial(kernel, waits=waits)))(given)
    is_right = np.array_equal(copied, given)
    jax.jit(copy(functools.partial(kernel, waits=True)))(given)  # it does not hide the races before
    races = interpret_pallas_call.races
    pltpu.reset_tpu_interpret_mode_state()
    assert races is not None
    assert (is_right, races.races_found) == (waits, not waits)


def test_clocks_are_ordered_as_jax_orders_them():
    vector_clock = pytest.importorskip("jax._src.pallas.mosaic.interpret.vector_clock")
    if not hasattr(vector_clock, "lt"):
        pytest.skip("this JAX has clocks of another kind")
    clocks = [np.array(times, np.int32) for times in itertools.product(range(3), repeat=3)]
    for one, other in itertools.product(clocks, clocks):
        expected = vector_clock.lt(one, other) or vector_clock.lt(other, one)
        assert ordered(one, other) == expected
