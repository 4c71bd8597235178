"""One batch of a server, from its file of requests to its files of answers and errors.

The journal (`jaxllm.batch.journal`) records finished lines, so that a batch goes on where a server
ended. One thread does all of a batch's work on disk, and the event loop the rest: it starts lines
while there are seats in the engine, which all batches share, and has results written every second.
"""

import asyncio
import itertools
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from jaxllm.batch.custom_ids import CustomIds
from jaxllm.batch.input import Item, read_items
from jaxllm.batch.journal import Journal, Kind
from jaxllm.batch.lines import BadLine, Line, LineError, LineReader, PooledPrompts
from jaxllm.batch.process import processed
from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.logging import init_logger
from jaxllm.openai.batches.objects import Batch, BatchStatus, RequestCounts
from jaxllm.openai.batches.store import BatchStore
from jaxllm.openai.errors import AnswerError, NotFoundError, UnavailableError
from jaxllm.server.limits import check_logprobs
from jaxllm.server.merged import merged
from jaxllm.server.service import Service

logger = init_logger(__name__)

_LOOK_S = 1.0
_RETRY_S = 30
_LINES_PER_READ = 64
_MAX_LINE_BYTES = 16 << 20
_MAX_TRIES = 3

Result = TypeVar("Result")
# Why a batch ends before its lines do. A server that stops leaves the rest to the next one.
_End = Literal["cancelled", "expired", "stopping"]


class _Files(NamedTuple):
    """What is open while a batch runs. Only the batch's thread uses it."""

    lines: Iterator[tuple[Item, Line]]
    journal: Journal


class BatchJob:
    """Runs one batch."""

    def __init__(
        self,
        service: Service,
        store: BatchStore,
        seats: asyncio.Semaphore,
        owner: str,
        batch: Batch,
    ):
        self._service = service
        self._store = store
        self._seats = seats
        self._owner = owner
        self._batch = batch
        self._folder = store.folder(batch)
        self._disk = ThreadPoolExecutor(1, "batch")
        self._results: list[tuple[int, Kind, bytes]] = []  # not yet written

    async def run(self) -> None:
        """Run the batch until it ends or the server stops."""
        try:
            await self._run()
        except EngineDeadError:
            pass  # the server ends, and the next one goes on
        except NotFoundError as error:
            await self._fail("file_not_found", str(error))
        except (OSError, sqlite3.Error) as error:
            # What was written is safe, and the batch goes on when there is room.
            logger.error("%s: %s; it is tried again in %d s", self._batch.id, error, _RETRY_S)
            await asyncio.sleep(_RETRY_S)
        finally:
            self._disk.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        _, source = await self._on_disk(
            partial(self._store.file, self._owner, self._batch.input_file_id, "input_file_id")
        )
        most = self._service.options.max_batch_lines
        total = await self._on_disk(partial(_count_lines, source, most))
        if total == 0:
            return await self._fail("empty_file", "the input file has no lines")
        if total > most:
            why = f"the input file has more than {most} lines (--max-batch-lines)"
            return await self._fail("too_many_requests", why)
        async with self._open(source) as files:
            await self._begin(_counts(total, files.journal.num_results))
            end = await self._answer(files, total)
        if end == "stopping":
            return
        if end == "expired":
            async with self._open(source) as files:  # from the beginning, for what was under way
                await self._on_disk(partial(_expire, files, self._batch.id))
        await self._finish(end or "completed", total, files.journal.num_results)

    async def _begin(self, counts: RequestCounts) -> None:
        since = self._batch.in_progress_at or int(time.time())
        # Somebody may have cancelled the batch before its turn.
        await self._change(
            unless="cancelling", status="in_progress", in_progress_at=since, request_counts=counts
        )

    @asynccontextmanager
    async def _open(self, source: Path) -> AsyncGenerator[_Files, None]:
        def open_all() -> tuple[_Files, Callable[[], None]]:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            answers, errors = self._outputs
            journal = Journal(self._folder / "journal", answers, errors)
            custom_ids = CustomIds(self._folder / "custom_ids")
            file = open(source, "rb")
            reader = LineReader(self._batch.id, custom_ids, self._batch.endpoint)
            # Every line is read, also a finished one: no later line may have its custom_id.
            lines = ((item, reader.read(item)) for item in read_items(file, _MAX_LINE_BYTES))
            unfinished = (one for one in lines if one[0].number not in journal.finished)

            def close() -> None:
                journal.close()
                custom_ids.close()
                file.close()

            return _Files(unfinished, journal), close

        files, close = await self._on_disk(open_all)
        try:
            yield files
        finally:
            await self._on_disk(close)

    async def _answer(self, files: _Files, total: int) -> _End | None:
        """Answer the lines; return why that ended, if it was not because all are answered."""
        feeder = asyncio.create_task(self._feed(files))
        try:
            while not feeder.done():
                await asyncio.wait({feeder}, timeout=_LOOK_S)
                await self._write(files.journal, total)
                end = await self._why_end()
                if end is not None:
                    return end
            feeder.result()
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
            await self._write(files.journal, total)
        return await self._why_end()

    async def _why_end(self) -> _End | None:
        if self._service.is_stopping or not self._service.engine.is_running:
            return "stopping"
        batch = await self._on_disk(partial(self._store.batch, self._owner, self._batch.id))
        if batch.status == "cancelling":
            return "cancelled"
        return "expired" if time.time() > batch.expires_at else None

    async def _feed(self, files: _Files) -> None:
        """Start every line in its turn, and wait for all."""
        async with asyncio.TaskGroup() as group:
            while some := await self._on_disk(
                lambda: list(itertools.islice(files.lines, _LINES_PER_READ))
            ):
                for item, line in some:
                    await self._seats.acquire()
                    task = group.create_task(self._answer_line(item, line))
                    task.add_done_callback(lambda _: self._seats.release())

    async def _answer_line(self, item: Item, line: Line) -> None:
        """Answer a line, or say why not. If the server stops, the next one answers it."""
        service = self._service
        for attempt in range(1, _MAX_TRIES + 1):
            try:
                inputs = await self._processed(item, line, attempt)
                async with self._admitted(sum(len(one.requests) for one in inputs)):
                    outputs = await self._outputs_of(inputs)
                record, kind = line.answer(outputs, service.served), Kind.ANSWER
            except EngineDeadError:
                return
            except Exception as error:
                if service.is_stopping:
                    return
                if isinstance(error, AnswerError) and attempt < _MAX_TRIES:
                    continue
                if not isinstance(error, JaxLLMError):
                    logger.exception("%s: line %d failed", self._batch.id, item.line)
                record, kind = line.error(error), Kind.ERROR
            self._results.append((item.number, kind, record))
            return

    async def _processed(self, item: Item, line: Line, attempt: int) -> list[ProcessedInput]:
        """Validate and tokenize a line, off the event loop, as `AnswerEndpoint` does."""
        service, engine, size = self._service, self._service.engine, item.num_bytes
        read = partial(line.read, service.served)
        prompts = await service.in_text_thread(line.body, read, size)
        name = f"{self._batch.id}-{item.number}-{attempt}"
        process = partial(processed, engine, prompts, line, item.number, name)
        if isinstance(prompts, PooledPrompts):
            return await engine.in_tokenizer_thread(process, size)
        has_form = prompts.params.structured_outputs is not None
        loaded = await engine.images.loaded(prompts.prompts)
        prompts = msgspec.structs.replace(prompts, prompts=loaded)
        process = partial(processed, engine, prompts, line, item.number, name)
        inputs = await engine.in_tokenizer_thread(process, size, has_form=has_form)
        lengths = [len(one.prompt_token_ids) for one in inputs]
        check_logprobs(
            prompts.params,
            lengths,
            engine.info,
            service.options.max_request_logprobs,
            num_shown=prompts.num_copies,
        )
        return inputs

    @asynccontextmanager
    async def _admitted(self, num: int) -> AsyncGenerator[None, None]:
        """Count so many answers as under way, once there are not too many."""
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(self._service.admission.answers(num))
                    break
                except UnavailableError:
                    await asyncio.sleep(_LOOK_S)
            yield

    async def _outputs_of(self, inputs: list[ProcessedInput]) -> list[Any]:
        last: dict[int, Any] = {}
        streams = [self._service.engine.submit(one) for one in inputs]
        async with aclosing(merged(streams)) as outputs:
            async for place, output in outputs:
                last[place] = output
        return [last[place] for place in range(len(inputs))]

    # ---- the record

    async def _write(self, journal: Journal, total: int) -> None:
        """Make the results so far durable, and count them."""
        results, self._results = self._results, []
        if not results:
            return

        def write() -> None:
            for number, kind, record in results:
                journal.append(number, kind, record)
            journal.commit()

        await self._on_disk(write)
        await self._change(request_counts=_counts(total, journal.num_results))

    async def _finish(self, status: BatchStatus, total: int, num_results: list[int]) -> None:
        now = int(time.time())
        await self._on_disk(
            partial(
                self._store.finish,
                self._owner,
                self._batch.id,
                self._outputs,
                status=status,
                request_counts=_counts(total, num_results),
                finalizing_at=now,
                **{f"{status}_at": now},
            )
        )
        await self._on_disk(partial(self._store.remove_journal, self._batch))
        logger.info("%s: %s; %d answers, %d errors", self._batch.id, status, *num_results)

    async def _fail(self, code: str, message: str) -> None:
        await self._on_disk(partial(self._store.fail, self._batch.id, code, message))

    async def _change(self, *, unless: str | None = None, **fields: Any) -> None:
        await self._on_disk(partial(self._store.change, self._batch.id, unless=unless, **fields))

    async def _on_disk(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    @property
    def _outputs(self) -> tuple[Path, Path]:
        """The files of answers and of errors."""
        return self._folder / "answers.jsonl", self._folder / "errors.jsonl"


def _counts(total: int, num_results: list[int]) -> RequestCounts:
    completed, failed = num_results
    return RequestCounts(total=total, completed=completed, failed=failed)


def _count_lines(path: Path, most: int) -> int:
    """How many lines have a request; no more than one above `most` are counted."""
    try:
        with open(path, "rb") as file:
            return sum(1 for _ in itertools.islice(read_items(file, _MAX_LINE_BYTES), most + 1))
    except FileNotFoundError:
        raise NotFoundError("input_file_id: the file was deleted") from None


def _expire(files: _Files, batch_id: str) -> None:
    """Say of every unfinished line that its time is over."""
    error = LineError("batch_expired", "the batch's time was over before this line's turn")
    for item, line in files.lines:
        if item.number not in files.journal.finished:
            bad = BadLine(batch_id, item, line.custom_id, error)
            files.journal.append(item.number, Kind.ERROR, bad.error(error))
    files.journal.commit()
