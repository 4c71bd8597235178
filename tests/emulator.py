"""The emulator of TPUs calls Python for every access to memory. Most of the time of such a call
went to what is around it, which is done here for less and with the same results. And it forgets the
races of a kernel when the next one starts, which it does not here."""

import importlib.metadata
import logging
from operator import ge, le

import numpy as np


def improve_the_emulator() -> None:
    """From now on programs that call Python give it arrays of numpy, as they have them: JAX would
    make arrays of its own of them, which the emulator takes apart again at once. And races that
    were found are there until the next reset: JAX would forget them when another kernel starts."""
    if not importlib.metadata.version("jax").startswith("0.10."):
        return  # the emulator of GPUs, which comes with 0.11, takes nothing but arrays of JAX
    from jax._src import callback as callbacks
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call, vector_clock
    from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState

    def io_callback_impl(*args, callback, **_) -> list[np.ndarray]:
        try:
            # Copies, since the memory is the program's.
            return [np.asarray(out) for out in callback(*map(np.array, args))]
        except BaseException:
            logging.getLogger("jax").exception("jax.io_callback failed")
            raise

    def begin_kernel(num_cores: int) -> RaceDetectionState:
        former = interpret_pallas_call.races  # None after a reset
        found = former is not None and former.races_found
        return RaceDetectionState(num_cores=num_cores, races_found=found)

    # JAX has no public names for these.
    callbacks.io_callback_impl = io_callback_impl
    vector_clock.ordered = ordered
    interpret_pallas_call.RaceDetectionState = begin_kernel


def ordered(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether of two vector clocks, of a few numbers each, one is before the other. The emulator
    asks it of every access and all former ones to the same memory, to find races."""
    times, others = one.tolist(), other.tolist()
    no_later, no_earlier = all(map(le, times, others)), all(map(ge, times, others))
    return no_later != no_earlier
