"""The requests of a caller that waits for them: queued together, awaited while the engine steps."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.frontend.interrupts import InterruptsBetweenSteps
from jaxllm.frontend.llm_engine import LLMEngine
from jaxllm.frontend.progress_bar import RequestBar


class Calls:
    """Queues requests and keeps their last outputs until a call takes them."""

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        self._counter = itertools.count()
        self._finished: dict[str, Any] = {}  # last outputs that no call has returned yet

    def next_id(self) -> str:
        """An id that no unfinished request has: users may also add requests to the engine."""
        return next(id for id in map(str, self._counter) if not self._engine.is_known(id))

    def queue(self, processed: Sequence[ProcessedInput]) -> list[str]:
        """Queue all requests, or none of them. Return their ids."""
        ids = [one.request_id for one in processed]
        try:
            for one in processed:
                self._engine.submit(one, on_finish=self._keep)
        except BaseException:
            self._drop(ids)
            raise
        return ids

    def wait(self, ids: list[str], use_tqdm: bool | Callable[..., tqdm]) -> list[Any]:
        """Run the engine until these requests have ended; return their last outputs."""
        missing = set(ids) - self._finished.keys()
        progress = None
        try:
            progress = RequestBar(len(ids), len(ids) - len(missing), use_tqdm)
            with InterruptsBetweenSteps() as interrupts:
                while missing and self._engine.has_unfinished_requests():
                    for output in self._engine.step():
                        if output.finished and output.request_id in missing:
                            missing.remove(output.request_id)
                            progress.update(output)
                    interrupts.check()
            # Steps do not return requests that were aborted meanwhile.
            missing -= self._finished.keys()
            assert not missing, f"nobody answers {missing}"
        except BaseException:
            # Also on Ctrl-C: the engine stays usable, without requests of this call.
            self._drop(ids)
            raise
        finally:
            if progress is not None:
                progress.close()
        return [self._finished.pop(request_id) for request_id in ids]

    def _keep(self, output: Any) -> None:
        """Keep the last output of a request until a call returns it."""
        self._finished[output.request_id] = output

    def _drop(self, ids: list[str]) -> None:
        """Abort these requests and forget their outputs."""
        self._engine.abort_request(ids)
        for request_id in ids:
            self._finished.pop(request_id, None)
