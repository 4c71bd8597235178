"""Profiles of this process and its devices, for TensorBoard or xprof, taken on demand."""

import jax

from jaxllm.errors import ValidationError
from jaxllm.logging import init_logger

logger = init_logger(__name__)


class Profiler:
    """Takes one profile at a time. Where it is written is said at start, by whoever runs the
    engine, and never by a request."""

    def __init__(self, directory: str | None):
        self._directory = directory
        self._is_running = False

    def start(self) -> None:
        if self._directory is None:
            raise ValidationError(
                "start_profile: there is nowhere to write it; start the engine with profile_dir",
                parameter="profile_dir",
            )
        if self._is_running:
            raise ValidationError("start_profile: a profile is being taken; stop it first")
        jax.profiler.start_trace(self._directory)
        self._is_running = True
        logger.info("taking a profile, to be written to %s", self._directory)

    def stop(self) -> None:
        if not self._is_running:
            raise ValidationError("stop_profile: no profile is being taken; start one first")
        self._is_running = False
        jax.profiler.stop_trace()
        logger.info("the profile has been written to %s", self._directory)

    def close(self) -> None:
        """Write out what is being taken, if anything is."""
        if self._is_running:
            self.stop()
