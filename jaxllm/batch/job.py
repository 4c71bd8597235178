"""A batch from the command to the delivered files. Errors in the options are reported before the
model is loaded. A second run of the same command resumes where the first one ended."""

import contextlib
import fcntl
import functools
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NoReturn

from jaxllm.batch.custom_ids import CustomIds
from jaxllm.batch.delivery import write_ordered
from jaxllm.batch.input import read_items
from jaxllm.batch.journal import Journal, Kind
from jaxllm.batch.lines import LineReader
from jaxllm.batch.manifest import (
    Manifest,
    check_same_batch,
    make_manifest,
    read_manifest,
    write_manifest,
)
from jaxllm.batch.progress import Progress
from jaxllm.batch.run import BatchRun, unfinished_items
from jaxllm.batch.signals import Stopped, StopSignal
from jaxllm.batch.storage import Location
from jaxllm.config import EngineConfig
from jaxllm.errors import JaxLLMError, ValidationError, refused
from jaxllm.frontend.llm_engine import LLMEngine
from jaxllm.logging import init_logger
from jaxllm.lora.adapter_file import content_of
from jaxllm.openai.served_adapters import read_lora_modules
from jaxllm.openai.served_model import ServedModel
from jaxllm.parsers.options import ParserOptions
from jaxllm.watch import Watch

logger = init_logger(__name__)

EXIT_HUNG = 1


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The options of a batch, without the engine's."""

    input_file: str
    output_file: str
    error_file: str | None = None  # None: named after the output
    journal_dir: str | None = None  # None: beside a local output, else in the current directory
    ordered: bool = False
    grace_period_s: float = 20.0
    price_per_hour: float | None = None
    served_model_name: tuple[str, ...] = ()
    lora_modules: tuple[str, ...] = ()
    chat_template: str | None = None
    parsers: ParserOptions = ParserOptions()
    max_line_bytes: int = 16 << 20

    def validate(self) -> None:
        self.parsers.validate()
        for name, low in (("grace_period_s", 0), ("price_per_hour", 0), ("max_line_bytes", 1)):
            value = getattr(self, name)
            if value is not None and not low <= value < float("inf"):
                raise refused(name, value, f"it must be a finite number of at least {low}")


def run_batch(options: BatchOptions, engine_options: dict[str, Any]) -> bool:
    """Answer all lines of the input. Return False if a signal stopped it; the same call resumes."""
    options.validate()
    config = EngineConfig.create(**engine_options)
    start_engine = functools.partial(LLMEngine, config)
    with StopSignal(options.grace_period_s) as stop:
        try:
            if config.parallel.may_follow:
                # Before any file is touched, because a rank that follows does not return from here.
                engine = start_engine()
                start_engine = lambda: engine  # noqa: E731
            job = _Job(options, engine_options)
            with _locked(job.folder):
                return job.run(start_engine, stop)
        except Stopped:
            logger.warning("batch: stopped before the end; the same command goes on")
            return False


def _end_hung(reason: str) -> NoReturn:
    """Exit at once: only that ends a process that waits for a device. The journal is complete."""
    logger.error("batch: the same command goes on, in a process whose devices answer")
    sys.stderr.flush()
    os._exit(EXIT_HUNG)


class _Job:
    """The files of a batch."""

    def __init__(self, options: BatchOptions, engine_options: dict[str, Any]):
        self._options = options
        self._input = Location(options.input_file)
        answers = Location(options.output_file)
        errors = Location(options.error_file or _beside(options.output_file, ".errors"))
        if answers.is_same_as(errors):
            raise refused("error_file", errors.name, "it is the output, too; give another")
        self._fingerprint = self._input.fingerprint()
        self._targets = {Kind.ANSWER: answers, Kind.ERROR: errors}
        if options.journal_dir is not None:
            self.folder = Path(options.journal_dir).expanduser()
        elif answers.is_local:
            self.folder = answers.local_path.with_name(answers.local_path.name + ".journal")
        else:
            self.folder = Path(answers.path.rpartition("/")[2] + ".journal")
        settings = {
            # Names without directories, because the files may have moved to another disk.
            "output_file": PurePath(answers.path).name,
            "error_file": PurePath(errors.path).name,
            "ordered": options.ordered,
            "served_model_name": list(options.served_model_name),
            "lora_modules": [
                [one.lora_name, content_of(Path(one.lora_path))]
                for one in read_lora_modules(options.lora_modules)
            ],
            "chat_template": options.chat_template and _digest(options.chat_template),
            "reasoning_parser": options.parsers.reasoning_parser,
            "tool_call_parser": options.parsers.tool_call_parser,
            "max_line_bytes": options.max_line_bytes,
        }
        self._now = make_manifest(self._fingerprint, settings, engine_options)
        for target in self._targets.values():
            target.check_writable()
        self.folder.mkdir(exist_ok=True)

    def run(self, start_engine: Callable[[], LLMEngine], stop: StopSignal) -> bool:
        """Do the remaining work; return False if it was stopped."""
        manifest = self._begin()
        if manifest.is_delivered:
            self._check_delivered()
            logger.info("batch: all was finished by an earlier run; there is nothing to do")
            return True
        with contextlib.closing(
            Journal(self.folder / "journal", self._results(Kind.ANSWER), self._results(Kind.ERROR))
        ) as journal:
            if not self._answer(journal, manifest.batch_id, start_engine, stop):
                return False
            num_items, (num_answers, num_errors) = journal.finished.low, journal.num_results
        self._deliver(manifest, num_items)
        logger.info(
            "batch: complete; %d answers in %s, %d errors in %s",
            num_answers,
            self._targets[Kind.ANSWER],
            num_errors,
            self._targets[Kind.ERROR],
        )
        return True

    def _begin(self) -> Manifest:
        """Resume the batch of this folder, or begin one."""
        path = self.folder / "manifest.json"
        begun = read_manifest(path)
        used = [target for target in self._targets.values() if target.exists() and target.size()]
        if begun is None:
            if used:
                raise ValidationError(
                    f"{used[0]} exists, and {self.folder} has no journal to go on with; move it "
                    "away, or give another output"
                )
        elif begun.is_delivered or used or _size(self.folder / "journal"):
            check_same_batch(path, begun, self._now)
            return begun
        # A batch without results, for example because the model was missing, may change settings.
        write_manifest(path, self._now)
        return self._now

    def _answer(
        self,
        journal: Journal,
        batch_id: str,
        start_engine: Callable[[], LLMEngine],
        stop: StopSignal,
    ) -> bool:
        """Answer the unfinished items; return False if that was stopped."""
        with contextlib.ExitStack() as cleanup:
            file = cleanup.enter_context(self._input.open())
            custom_ids = CustomIds(self.folder / "custom_ids")
            cleanup.callback(custom_ids.close)
            reader = LineReader(batch_id, custom_ids)
            progress = Progress(self._fingerprint.size, self._options.price_per_hour)
            items = unfinished_items(
                read_items(file, self._options.max_line_bytes), journal, reader, progress
            )
            first = next(items, None)
            if first is None:
                return True  # a run was killed after its last line; the model is not needed
            engine = start_engine()
            cleanup.callback(engine.shutdown)
            progress.start()
            cleanup.callback(progress.close)
            run = BatchRun(
                engine,
                ServedModel.of(
                    engine,
                    self._options.served_model_name,
                    self._options.lora_modules,
                    chat_template=self._options.chat_template,
                    answer_format=self._options.parsers.answer_format,
                ),
                itertools.chain([first], items),
                reader,
                journal,
                progress,
                stop,
            )
            watch = Watch(engine.config, on_hang=_end_hung)
            watch.at_work = run.at_work
            watch.start()
            cleanup.callback(watch.stop)
            with stop.deferred():
                is_complete = run.run()
        logger.info("batch: %s", progress.summary())
        if not is_complete:
            logger.warning("batch: stopped before the end; the same command goes on")
        return is_complete

    # ---- result files and their destinations

    def _is_direct(self, kind: Kind) -> bool:
        """Whether results are appended to the output file directly."""
        return self._targets[kind].is_local and not self._options.ordered

    def _results(self, kind: Kind) -> Path:
        """The file that the journal appends to."""
        if self._is_direct(kind):
            return self._targets[kind].local_path
        return self.folder / f"{kind.name.lower()}s.jsonl"

    def _deliver(self, manifest: Manifest, num_items: int) -> None:
        indirect = [kind for kind in Kind if not self._is_direct(kind)]
        try:
            for kind in indirect:
                self._deliver_one(kind, num_items)
            manifest.is_delivered = True
            write_manifest(self.folder / "manifest.json", manifest)
        except OSError as error:
            raise JaxLLMError(
                f"all lines are finished, but the results cannot be delivered: {error.strerror}; "
                "make room and run the same command"
            ) from error
        for kind in indirect:
            self._results(kind).unlink(missing_ok=True)

    def _deliver_one(self, kind: Kind, num_items: int) -> None:
        target, results = self._targets[kind], self._results(kind)
        if not self._options.ordered:
            target.put(results)
            return
        ordered = results.with_suffix(".ordered")
        if target.is_local:  # write on its own disk, so that a rename is atomic
            ordered = target.local_path.with_name(target.local_path.name + ".tmp")
        write_ordered(self.folder / "journal", kind, results, ordered, num_items)
        target.put(ordered)
        ordered.unlink(missing_ok=True)

    def _check_delivered(self) -> None:
        for target in self._targets.values():
            if not target.exists():
                raise ValidationError(
                    f"{target} was written by an earlier run and is not there any more; delete "
                    f"{self.folder} and what is left of the outputs to start anew"
                )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes. A killed process releases its lock."""
    with open(folder / "lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JaxLLMError(
                f"{folder}: another process is at work on this batch; wait for it or end it"
            ) from None
        yield


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _beside(name: str, suffix: str) -> str:
    """Insert a suffix: out.jsonl -> out.errors.jsonl."""
    stem, dot, extension = name.rpartition(".")
    return f"{stem}{suffix}.{extension}" if dot and "/" not in extension else name + suffix


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
