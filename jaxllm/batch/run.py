"""The loop of a batch: submits lines to an engine and writes results to the journal.

All of it is bounded: requests and prompt tokens in the engine, bytes of uncommitted results, and
lines per step of the engine. A request that fails because of an engine error is retried, the last
time alone, so that a request that breaks a step does not fail those that ran beside it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jaxllm.batch.input import Item
from jaxllm.batch.journal import Journal, Kind
from jaxllm.batch.lines import Line, LineReader
from jaxllm.batch.process import processed
from jaxllm.batch.progress import Progress
from jaxllm.batch.signals import StopSignal
from jaxllm.errors import JaxLLMError
from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.frontend.llm_engine import LLMEngine
from jaxllm.logging import init_logger
from jaxllm.openai.errors import AnswerError
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import AnyOutput, RequestOutput
from jaxllm.watch import Work

logger = init_logger(__name__)

# Requests in the engine, as a multiple of those that run at once. Some must wait in the engine, so
# that the next step can fill a free slot.
_REQUESTS_PER_SEAT = 3
# Their prompts, as a multiple of the tokens that the KV cache holds.
_PROMPTS_PER_CACHE = 2
_LINES_PER_TURN = 1024
# Results become durable after this time or this many bytes, whichever comes first. The engine waits
# while the disk syncs. On a slow disk, syncs take at most a fiftieth of the time, and results wait
# longer.
_COMMIT_EVERY_S = 1.0
_COMMIT_SHARE = 1 / 50
_COMMIT_BYTES = 4 << 20
_MAX_TRIES = 3  # the last try is alone
_MAX_FAILURES_IN_A_ROW = 8  # of requests that ran alone


@dataclass(slots=True, eq=False)
class _Pending:
    """A line in the engine: one request for each prompt."""

    item: Item
    line: Line
    inputs: list[ProcessedInput]
    outputs: list[AnyOutput | None] = field(default_factory=list)
    num_left: int = 0
    num_tries: int = 0

    @property
    def num_requests(self) -> int:
        return sum(len(one.requests) for one in self.inputs)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(one.prompt_token_ids) for one in self.inputs)


def unfinished_items(
    items: Iterator[Item], journal: Journal, reader: LineReader, progress: Progress
) -> Iterator[Item]:
    """Skip the items that an earlier run finished."""
    for item in items:
        if item.number in journal.finished:
            reader.skip(item)
            progress.skip(item.num_bytes)
        else:
            yield item


class BatchRun:
    """One run over the unfinished items of a batch."""

    def __init__(
        self,
        engine: LLMEngine,
        served: ServedModel,
        items: Iterator[Item],
        reader: LineReader,
        journal: Journal,
        progress: Progress,
        stop: StopSignal,
    ):
        self._engine = engine
        self._served = served
        self._items = items
        self._reader = reader
        self._journal = journal
        self._progress = progress
        self._stop = stop
        self._next: Item | None = next(items, None)
        self._under_way: set[_Pending] = set()
        self._ended: deque[_Pending] = deque()  # since the last step
        self._to_retry: deque[_Pending] = deque()
        self._num_requests = self._num_prompt_tokens = 0  # under way
        self._is_one_alone = False  # whether no other item may start
        self._failures_in_a_row = 0
        self._num_steps = 0
        self._is_stepping = False
        self._commit_at = time.monotonic() + _COMMIT_EVERY_S
        replicas = engine.config.parallel.data_parallel_size
        info = engine.info
        self._max_requests = _REQUESTS_PER_SEAT * info.max_num_seqs * replicas
        self._max_prompt_tokens = _PROMPTS_PER_CACHE * info.num_cache_tokens * replicas

    def run(self) -> bool:
        """Run until all items are finished (return True) or a signal stops the run (False). In any
        case finished results are committed, unless the disk fails."""
        try:
            while not self._stop.is_due:
                self._feed()
                if not self._engine.has_unfinished_requests():
                    if self._stop.is_requested or self._is_all_done:
                        break
                else:
                    self._step()
                self._take_ended()
                self._commit_if_due()
        except _JournalError:
            raise
        except BaseException:
            self._take_ended()
            self._commit()
            raise
        finally:
            self._engine.abort_request(
                [one.request_id for pending in self._under_way for one in pending.inputs]
            )
        self._commit()
        return self._is_all_done

    def at_work(self) -> list[Work]:
        """The current step, if any; file operations are not watched. Any thread may call this."""
        return [Work("the step", self._num_steps)] if self._is_stepping else []

    def _step(self) -> None:
        self._num_steps += 1
        self._is_stepping = True
        try:
            self._engine.step()
        finally:
            self._is_stepping = False

    @property
    def _is_all_done(self) -> bool:
        return self._next is None and not self._under_way and not self._to_retry

    # ---- in

    def _feed(self) -> None:
        """Start items until the engine has enough, or up to a limit, so that it need not wait."""
        if self._to_retry or self._is_one_alone:
            if not self._stop.is_requested:
                self._retry()
            return
        for _ in range(_LINES_PER_TURN):
            item = self._next
            if (
                item is None
                or self._stop.is_requested
                or self._num_requests >= self._max_requests
                or self._num_prompt_tokens >= self._max_prompt_tokens
                or self._journal.num_pending_bytes >= _COMMIT_BYTES
                or not self._journal.finished.has_room(item.number)
            ):
                return
            self._start(item)
            self._next = next(self._items, None)

    def _start(self, item: Item) -> None:
        line = self._reader.read(item)
        try:
            inputs = self._process(item, line)
        except Exception as error:
            # An unexpected error in one line must not stop the others.
            if not isinstance(error, JaxLLMError):
                logger.exception("line %d failed unexpectedly", item.line)
            self._finish(item, Kind.ERROR, line.error(error))
        else:
            self._submit(_Pending(item, line, inputs))

    def _process(self, item: Item, line: Line) -> list[ProcessedInput]:
        prompts = line.read(self._served)
        return processed(self._engine, prompts, line, item.number, f"batch-{item.number}")

    def _submit(self, pending: _Pending) -> None:
        pending.outputs = [None] * len(pending.inputs)
        pending.num_left = len(pending.inputs)
        pending.num_tries += 1
        self._under_way.add(pending)
        self._num_requests += pending.num_requests
        self._num_prompt_tokens += pending.num_prompt_tokens
        for place, one in enumerate(pending.inputs):
            self._engine.submit(one, on_finish=self._taker(pending, place))

    def _retry(self) -> None:
        """Retry items after an engine error: together first, and the last time each alone."""
        while self._to_retry and not self._is_one_alone:
            is_last_try = self._to_retry[0].num_tries == _MAX_TRIES - 1
            if is_last_try and self._under_way:
                return
            self._is_one_alone = is_last_try
            self._submit(self._to_retry.popleft())

    # ---- out

    def _taker(self, pending: _Pending, place: int) -> Callable[[AnyOutput], None]:
        """Make the callback for a request's last output; it must not raise in the engine."""

        def take(output: AnyOutput) -> None:
            pending.outputs[place] = output
            pending.num_left -= 1
            if not pending.num_left:
                self._ended.append(pending)

        return take

    def _take_ended(self) -> None:
        while self._ended:
            pending = self._ended.popleft()
            self._under_way.remove(pending)
            self._is_one_alone = False
            self._num_requests -= pending.num_requests
            self._num_prompt_tokens -= pending.num_prompt_tokens
            self._take(pending, [output for output in pending.outputs if output is not None])

    def _take(self, pending: _Pending, outputs: list[AnyOutput]) -> None:
        was_alone = pending.num_tries == _MAX_TRIES
        try:
            record = pending.line.answer(outputs, self._served)
        except AnswerError as error:
            if not was_alone:
                self._to_retry.append(pending)
                return
            self._finish(pending.item, Kind.ERROR, pending.line.error(error))
            self._failures_in_a_row += 1
            if self._failures_in_a_row == _MAX_FAILURES_IN_A_ROW:
                raise JaxLLMError(
                    f"the engine failed at {_MAX_FAILURES_IN_A_ROW} requests in a row, each alone; "
                    f"the last time: {error}. The same command goes on"
                ) from error
        except Exception as error:
            logger.exception("line %d failed unexpectedly", pending.item.line)
            self._finish(pending.item, Kind.ERROR, pending.line.error(error))
        else:
            self._failures_in_a_row = 0
            self._journal.append(pending.item.number, Kind.ANSWER, record)
            self._progress.answer(
                pending.item.num_bytes,
                pending.num_prompt_tokens,
                sum(
                    len(one.token_ids)
                    for output in outputs
                    if isinstance(output, RequestOutput)
                    for one in output.outputs
                ),
            )

    def _finish(self, item: Item, kind: Kind, record: bytes) -> None:
        self._journal.append(item.number, kind, record)
        self._progress.error(item.num_bytes)

    def _commit_if_due(self) -> None:
        if time.monotonic() >= self._commit_at or self._journal.num_pending_bytes >= _COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        start = time.monotonic()
        try:
            self._journal.commit()
        except OSError as error:
            raise _JournalError(error) from error
        end = time.monotonic()
        self._commit_at = end + max(_COMMIT_EVERY_S, (end - start) / _COMMIT_SHARE)


class _JournalError(JaxLLMError):
    """The results cannot be written."""

    def __init__(self, error: OSError):
        super().__init__(
            f"the results cannot be written: {error.strerror}. What was written until now is safe; "
            "make room and run the same command to go on"
        )
