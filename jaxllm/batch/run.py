"""The loop of a batch: lines into an engine, results into the journal, until the input ends.

Bounded everywhere: so many requests and prompt tokens in the engine, so many bytes of results that
are not committed, so many lines per step of the engine. What ends in an error of the engine, and
not of its own, is tried again, at last alone: a request that makes a step fail must not take those
with it that happened to run beside it.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxllm.batch.input import Item
from jaxllm.batch.journal import Journal, Kind
from jaxllm.batch.lines import Line, LineReader
from jaxllm.batch.progress import Progress
from jaxllm.batch.signals import StopSignal
from jaxllm.errors import JaxLLMError, ValidationError
from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.frontend.llm_engine import LLMEngine
from jaxllm.logging import init_logger
from jaxllm.openai.errors import AnswerError
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import RequestOutput
from jaxllm.watch import Work

logger = init_logger(__name__)

# Requests in the engine, as a multiple of those that run at once: some must wait at its door, so
# that a place which falls free is filled in the next step.
_REQUESTS_PER_SEAT = 3
# Their prompts, as a multiple of the tokens that the KV cache holds.
_PROMPTS_PER_CACHE = 2
_LINES_PER_TURN = 1024
# Results are durable after so long, or so much, whichever comes first. While the disk syncs, the
# engine waits: where that is slow it may take a fiftieth of the time, and results wait longer.
_COMMIT_EVERY_S = 1.0
_COMMIT_SHARE = 1 / 50
_COMMIT_BYTES = 4 << 20
_MAX_TRIES = 3  # the last one alone
_MAX_FAILURES_IN_A_ROW = 8  # of requests that were alone


@dataclass(slots=True, eq=False)
class _Pending:
    """A line in the engine, as one request for each of its prompts."""

    item: Item
    line: Line
    inputs: list[ProcessedInput]
    outputs: list[RequestOutput | None] = field(default_factory=list)
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
    """Pass over what an earlier run finished."""
    for item in items:
        if item.number in journal.finished:
            reader.skip(item)
            progress.skip(item.num_bytes)
        else:
            yield item


class BatchRun:
    """One run over the items of a batch that are not finished yet."""

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
        self._is_one_alone = False  # whether what is under way must stay alone
        self._failures_in_a_row = 0
        self._num_steps = 0
        self._is_stepping = False
        self._commit_at = time.monotonic() + _COMMIT_EVERY_S
        replicas = engine.config.parallel.data_parallel_size
        info = engine.info
        self._max_requests = _REQUESTS_PER_SEAT * info.max_num_seqs * replicas
        self._max_prompt_tokens = _PROMPTS_PER_CACHE * info.num_blocks * info.block_size * replicas

    def run(self) -> bool:
        """Go on until all items are finished (True) or a signal stops it (False). However it
        ends, what is finished is committed; only a disk that takes nothing more prevents that."""
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
        """The step, if there is one: files may be as slow as they are. From any thread."""
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
        """Start items until the engine has enough, or for a while: it should not wait for us."""
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
            # Whatever a line makes of us, the others go on.
            if not isinstance(error, JaxLLMError):
                logger.exception("line %d failed unexpectedly", item.line)
            self._finish(item, Kind.ERROR, line.error(error))
        else:
            self._submit(_Pending(item, line, inputs))

    def _process(self, item: Item, line: Line) -> list[ProcessedInput]:
        """Validate and tokenise. Without a seed of its own, a request gets one by its place in the
        batch: its answer does not depend on where a run before was killed."""
        asked = line.read(self._served)
        inputs = []
        for place, prompt in enumerate(asked.prompts):
            params = asked.params
            if params.seed is None:
                params = params.clone(seed=self._seed(item.number, place))
            options: dict[str, Any] = {}
            if asked.truncate_prompt_tokens is not None:
                options["truncate_prompt_tokens"] = asked.truncate_prompt_tokens
            try:
                read = self._engine.process_input(
                    f"batch-{item.number}-{place}",
                    prompt,
                    params,
                    priority=asked.priority,
                    tokenization_kwargs=options,
                )
            except ValidationError as error:
                raise line.in_its_words(error, place) from error
            inputs.append(read)
        return inputs

    def _seed(self, number: int, place: int) -> int:
        of = f"{self._engine.config.model.seed} {number} {place}".encode()
        return int.from_bytes(hashlib.blake2b(of, digest_size=8).digest(), "little")

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
        """Try again what the engine failed at: together once, and then each alone."""
        while self._to_retry and not self._is_one_alone:
            is_last_try = self._to_retry[0].num_tries == _MAX_TRIES - 1
            if is_last_try and self._under_way:
                return
            self._is_one_alone = is_last_try
            self._submit(self._to_retry.popleft())

    # ---- out

    def _taker(self, pending: _Pending, place: int) -> Callable[[RequestOutput], None]:
        """What the engine calls with the last output of a request; it must not raise there."""

        def take(output: RequestOutput) -> None:
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

    def _take(self, pending: _Pending, outputs: list[RequestOutput]) -> None:
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
                sum(len(one.token_ids) for output in outputs for one in output.outputs),
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
