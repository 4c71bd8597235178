"""Where the outputs of one request wait for its consumer."""

import asyncio

from jaxllm.outputs import RequestOutput


class OutputCollector:
    """Holds what has not been asked for yet, merged into one output: its size is bounded by that of
    the answer, however late the consumer is."""

    def __init__(self) -> None:
        # Whether outputs are added to each other, and not replaced by the next.
        self.aggregate = False
        self.is_aborted = False  # maybe before anything else knows of the request
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._output is None:
            self._output = output
        else:
            self._output.add(output, self.aggregate)
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        """There will be no more; what is here already is still handed out."""
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        """What has come since the last time; waits for something."""
        await self._ready.wait()
        output, self._output = self._output, None
        if self._error is None:
            self._ready.clear()
        elif output is None:
            raise self._error
        assert output is not None
        return output
