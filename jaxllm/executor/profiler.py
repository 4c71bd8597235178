"""Profiles of this process and its devices, for TensorBoard or xprof, taken on demand."""

import contextlib
from typing import ClassVar

import jax

from jaxllm.errors import ValidationError
from jaxllm.logging import init_logger

logger = init_logger(__name__)


class Profiler:
    """Takes profiles for one engine; JAX allows one at a time in a process. The directory is an
    option of the engine, so no request can choose it."""

    _taking: ClassVar["Profiler | None"] = None

    def __init__(self, directory: str | None):
        self._directory = directory

    def start(self) -> None:
        if self._directory is None:
            raise ValidationError(
                "start_profile: there is nowhere to write it; start the engine with profile_dir",
                parameter="profile_dir",
            )
        if Profiler._taking is not None:
            raise ValidationError("start_profile: a profile is being taken; stop it first")
        jax.profiler.start_trace(self._directory)
        Profiler._taking = self
        logger.info("taking a profile, to be written to %s", self._directory)

    def stop(self) -> None:
        if Profiler._taking is not self:
            raise ValidationError("stop_profile: no profile is being taken; start one first")
        Profiler._taking = None
        jax.profiler.stop_trace()
        logger.info("the profile has been written to %s", self._directory)

    def step(self, number: int) -> contextlib.AbstractContextManager[object]:
        """Return a context that marks its dispatches as one step in a profile. It costs nothing
        without a profile."""
        if Profiler._taking is None:
            return _NOTHING
        return jax.profiler.StepTraceAnnotation("step", step_num=number)

    def close(self) -> None:
        """Write out the current profile, if there is one."""
        if Profiler._taking is self:
            self.stop()


_NOTHING = contextlib.nullcontext()
