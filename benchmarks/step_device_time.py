"""The cost of a step on the device, with a host that never waits for it.

    python benchmarks/step_device_time.py --model DIR --load-format dummy --ceilings 4.3e12,790e12
    python benchmarks/step_device_time.py --model DIR --profile traces

Real steps, planned by the real scheduler, are dispatched one after the other. Only the last one is
awaited. So the device always has its next step, if a step takes longer than the host's work (which
is reported, too), and the time is the device's. Decodes are of a batch of requests at a context; a
prompt is one step. If the device's ceilings are given, the output has the share of the floor (see
floors.py).

With --profile DIR, some more decodes of each batch and two prompts are traced for TensorBoard or
xprof, each into its own file.
"""

import argparse
import contextlib
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import floors
import jax
import numpy as np
import side_by_side
from side_by_side import SHAPE_350M

from jaxllm.config import EngineConfig
from jaxllm.executor.base import PendingResult
from jaxllm.executor.uniproc import UniProcExecutor
from jaxllm.messages import EngineRequest
from jaxllm.runner.jax_setup import set_up_jax
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.kv.manager import KVCacheManager
from jaxllm.scheduler.schedule import Schedule, StepResult
from jaxllm.scheduler.scheduler import Scheduler

PROFILED_DECODES = 8


class Steps:
    """An engine's steps, which are dispatched without reading their tokens."""

    def __init__(self, config: EngineConfig) -> None:
        set_up_jax(config)
        self._executor = UniProcExecutor(config)
        self.info = self._executor.info
        self._scheduler = Scheduler(
            max_num_seqs=self.info.max_num_seqs,
            max_num_batched_tokens=self.info.max_num_batched_tokens,
            max_model_len=self.info.max_model_len,
            kv=KVCacheManager(
                groups=self.info.cache_groups,
                block_size=self.info.block_size,
                enable_prefix_caching=False,
            ),
        )
        self._ids = map(str, itertools.count())
        self._prompt = random.Random(0).choices(
            range(self.info.vocab_size), k=self.info.max_model_len
        )

    def add(self, num_prompt_tokens: int, max_tokens: int) -> str:
        """Queue a request with a random prompt, so that no prefix cache helps."""
        request_id = next(self._ids)
        self._scheduler.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=self._prompt[:num_prompt_tokens],
                sampling_params=SamplingParams(temperature=0, ignore_eos=True),
                max_tokens=max_tokens,
                seed=0,
            )
        )
        return request_id

    def dispatch(self) -> tuple[Schedule, PendingResult]:
        schedule = self._scheduler.schedule()
        assert schedule is not None, "there is a request"
        pending = self._executor.execute(schedule)
        # Report success to the scheduler at once; the tokens do not matter.
        self._scheduler.update(schedule, StepResult(np.zeros(schedule.num_rows, np.int32), None))
        return schedule, pending

    def run(self, num_steps: int, prompt_tokens: int = 0) -> tuple[float, float]:
        """Measure seconds per step: of the device, and of the host to dispatch it. With
        `prompt_tokens`, each step is a new prompt."""
        start = time.perf_counter()
        for _ in range(num_steps):
            if prompt_tokens:
                self.add(prompt_tokens, 1)
            _, pending = self.dispatch()
        dispatched = time.perf_counter()
        pending.result()
        return (time.perf_counter() - start) / num_steps, (dispatched - start) / num_steps

    @contextlib.contextmanager
    def decoding(self, batch: int, num_prompt_tokens: int, num_steps: int) -> Iterator[None]:
        """A batch after its prompts, with room for this many steps."""
        # The first requests decode while the prompts of the last are computed.
        room = num_steps + 1 + -(-batch * num_prompt_tokens // self.info.max_num_batched_tokens)
        ids = [self.add(num_prompt_tokens, 2 * room) for _ in range(batch)]
        while True:
            schedule, pending = self.dispatch()
            if schedule.num_decodes == batch:
                break
        pending.result()
        yield
        self._scheduler.abort_requests(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    side_by_side.add_model_arguments(parser)
    floors.add_argument(parser)
    parser.set_defaults(max_model_len=16384)
    parser.add_argument("--batches", default="1,64", help="requests that decode at once")
    parser.add_argument("--context", type=int, default=1024, help="tokens that a decode attends to")
    parser.add_argument("--prompts", default="8192", help="lengths of prompts, a step each")
    parser.add_argument("--steps", type=int, default=32, help="dispatched for a timing")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--profile", metavar="DIR", help="keep a trace of a few steps of each kind")
    side_by_side.add_out_argument(parser)
    args = parser.parse_args()
    with side_by_side.checkpoint(args.model, args.dtype, **SHAPE_350M) as model:
        config = EngineConfig.create(
            model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            **side_by_side.engine_options(args),
        )
        steps = Steps(config)
        rates = args.ceilings or (float("nan"), float("nan"))
        line = floors.of_llama(
            json.loads((Path(model) / "config.json").read_text()), args.dtype, rates
        )
        rows = []
        for batch in side_by_side.numbers(args.batches):
            with _decoding(steps, batch, args):
                row = {"what": "decode", "batch": batch, "context": args.context}
                floor = floors.decode_s(line, batch, args.context)
                rows.append(row | _timed(steps, args.steps, args.repetitions, floor))
            _show(rows[-1])
        for length in side_by_side.numbers(args.prompts):
            num_prompts = max(2, args.steps // 8)
            row = {"what": "prefill", "tokens": length}
            floor = floors.prefill_s(line, length)
            rows.append(row | _timed(steps, num_prompts, args.repetitions, floor, length))
            _show(rows[-1])
        if args.profile:
            _profile(steps, args, Path(args.profile))
    side_by_side.record("step_device_time", rows, args)


def _decoding(
    steps: Steps, batch: int, args: argparse.Namespace
) -> contextlib.AbstractContextManager[None]:
    """A batch whose timed steps are centred at the context."""
    timed = args.steps * (args.repetitions + 1)
    return steps.decoding(batch, max(1, args.context - timed // 2), timed)


def _timed(
    steps: Steps, num_steps: int, repetitions: int, floor_s: float, prompt_tokens: int = 0
) -> dict[str, float]:
    steps.run(num_steps, prompt_tokens)
    device, host = zip(
        *(steps.run(num_steps, prompt_tokens) for _ in range(repetitions)), strict=True
    )
    device_s = statistics.median(device)
    return {
        "ms": device_s * 1e3,
        "ms_least": min(device) * 1e3,
        "ms_most": max(device) * 1e3,
        "host_ms": statistics.median(host) * 1e3,
        **({} if floor_s != floor_s else {"floor_ms": floor_s * 1e3, "share": floor_s / device_s}),
    }


def _show(row: dict) -> None:
    print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


def _profile(steps: Steps, args: argparse.Namespace, directory: Path) -> None:
    for batch in side_by_side.numbers(args.batches):
        with _decoding(steps, batch, args), _trace(directory, f"decode-{batch}"):
            steps.run(PROFILED_DECODES)
    for length in side_by_side.numbers(args.prompts):
        with _trace(directory, f"prefill-{length}"):
            steps.run(2, length)


@contextlib.contextmanager
def _trace(directory: Path, name: str) -> Iterator[None]:
    """Trace into DIR/NAME.xplane.pb, without the profiler's folders."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        jax.profiler.start_trace(folder)
        try:
            yield
        finally:
            jax.profiler.stop_trace()
        for path in Path(folder).rglob("*.xplane.pb"):
            path.rename(directory / f"{name}.xplane.pb")


if __name__ == "__main__":
    main()
