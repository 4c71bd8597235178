"""Holds the outputs of one request for its consumer."""

import asyncio

from jaxllm.outputs import AnyOutput, RequestOutput


class OutputCollector:
    """Merges the outputs that the consumer has not taken into one. The answer bounds its size,
    however late the consumer is."""

    def __init__(self) -> None:
        # Whether the next output is added to the one here; otherwise it replaces that one.
        self.aggregate = False
        self.is_aborted = False  # an abort may come before the request is processed
        self._output: AnyOutput | None = None
        self._error: BaseException | None = None
        self._ready = asyncio.Event()

    def put(self, output: AnyOutput) -> None:
        if self._output is None:
            self._output = output
        else:
            # Only requests that generate have more outputs than one.
            assert isinstance(self._output, RequestOutput) and isinstance(output, RequestOutput)
            self._output.add(output, self.aggregate)
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        """Note that no more outputs will come. `get` still returns the one here, then raises."""
        self._error = error
        self._ready.set()

    async def get(self) -> AnyOutput:
        """Wait for an output, and return what has come since the last call."""
        await self._ready.wait()
        output, self._output = self._output, None
        if self._error is None:
            self._ready.clear()
        elif output is None:
            raise self._error
        assert output is not None
        return output
