"""Maps a Ray dataset over many engines, for fleets: one engine in each actor of a running cluster.

This module does not import Ray, which is the extra `ray`; a caller with a dataset has it. There is
no journal: Ray itself keeps finished rows when a machine is killed, and restarts the others.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.config import EngineConfig
from jaxllm.errors import JaxLLMError, ValidationError
from jaxllm.frontend.llm_engine import LLMEngine
from jaxllm.frontend.prompt_length import PromptLength
from jaxllm.frontend.tokenizer import render_chat
from jaxllm.openai.answer import check_finished
from jaxllm.outputs import RequestOutput
from jaxllm.prompts import PromptType, TokensPrompt
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    import pyarrow
    from ray.data import Dataset

PROMPT_COLUMNS = ("prompt", "prompt_token_ids", "messages")
ANSWER_COLUMNS = ("generated_text", "generated_token_ids", "finish_reason", "error")


def generate(
    dataset: "Dataset",
    engine_options: Mapping[str, Any],
    sampling_params: SamplingParams | None = None,
    *,
    num_engines: int = 1,
    batch_size: int = 256,
    **ray_options: Any,
) -> "Dataset":
    """Answer every row of a dataset, lazily like other operations of Ray datasets.

    A row has a prompt in the column "prompt" (text), "prompt_token_ids" or "messages" (a
    conversation). It keeps its columns and gets "generated_text", "generated_token_ids",
    "finish_reason" and "error". A row that is refused or fails has an error and no answer.

        import ray
        from jaxllm import SamplingParams
        from jaxllm.batch.ray import generate

        answers = generate(
            ray.data.read_parquet("gs://bucket/prompts"),
            {"model": "Qwen/Qwen3-8B", "tensor_parallel_size": 4},
            SamplingParams(max_tokens=256),
            num_engines=8,
            resources={"TPU": 4},
        )
        answers.write_parquet("gs://bucket/answers")

    Args:
      engine_options: the arguments of `LLM`, including "model".
      sampling_params: for all rows (default: the model's); n must be 1. Without a seed, equal
        prompts get different answers.
      num_engines: actors with an engine each.
      batch_size: rows per batch. An engine works on several batches at once. About max_num_seqs
        rows is best.
      ray_options: what each actor needs, as for `Dataset.map_batches`: num_gpus=1, or
        resources={"TPU": 4}.
    """
    EngineConfig.create(**engine_options)  # refuse invalid options here, not in an actor
    if sampling_params is not None and sampling_params.n != 1:
        raise ValidationError(
            f"n={sampling_params.n}: a row has one answer; repeat the row, or use n=1",
            parameter="n",
            value=sampling_params.n,
        )
    return dataset.map_batches(
        EngineActor,  # pyright: ignore[reportArgumentType]  (Ray also takes async generators)
        fn_constructor_args=(dict(engine_options), sampling_params),
        batch_size=batch_size,
        batch_format="pyarrow",
        concurrency=num_engines,
        **ray_options,
    )


class _Answer(NamedTuple):
    """An answer; fields are in the order of ANSWER_COLUMNS."""

    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    error: str | None = None


class EngineActor:
    """An engine in an actor. Ray calls it with several batches at once, in one event loop. They
    share the engine's steps; a task of that loop runs steps while there is work."""

    def __init__(self, engine_options: dict[str, Any], sampling_params: SamplingParams | None):
        self._engine = LLMEngine(EngineConfig.create(**engine_options))
        if sampling_params is None:
            sampling_params = self._engine.info.default_sampling_params
        self._params = sampling_params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
        self._waiting: dict[str, asyncio.Future[_Answer]] = {}
        self._num_requests = 0
        self._stepping: asyncio.Task[None] | None = None

    async def __call__(self, batch: "pyarrow.Table") -> AsyncIterator["pyarrow.Table"]:
        import pyarrow

        _check_columns(batch.column_names)
        answers = [self._start(row) for row in batch.to_pylist()]
        if self._stepping is None and self._waiting:
            self._stepping = asyncio.create_task(self._step())
        rows = await asyncio.gather(*answers)
        text = pyarrow.string()
        for place, name in enumerate(ANSWER_COLUMNS):
            kind = pyarrow.list_(pyarrow.int64()) if name == "generated_token_ids" else text
            # Set the type: Arrow cannot infer it from a batch with only errors.
            batch = batch.append_column(name, pyarrow.array([row[place] for row in rows], kind))
        yield batch

    def _start(self, row: dict[str, Any]) -> "asyncio.Future[_Answer]":
        """Submit a row to the engine; answer at once if it is refused."""
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        request_id = str(self._num_requests)
        self._num_requests += 1
        params = self._params
        if params.seed is None:
            # The engine's default seeds would be the same in all actors.
            params = params.clone(seed=secrets.randbits(64))
        try:
            processed = self._engine.process_input(request_id, self._prompt_of(row), params)
        except ValidationError as error:
            answer.set_result(_Answer(error=str(error)))
            return answer
        self._waiting[request_id] = answer
        self._engine.submit(processed, on_finish=self._finish)
        return answer

    def _prompt_of(self, row: dict[str, Any]) -> PromptType:
        messages = row.get("messages")
        if messages is not None:
            if self._engine.tokenizer is None:
                raise ValidationError("messages need a tokenizer, but skip_tokenizer_init=True")
            # Arrow gives every message the union of all messages' fields.
            plain = [{k: v for k, v in one.items() if v is not None} for one in messages]
            length = PromptLength(self._engine.info.max_model_len)
            return render_chat(self._engine.tokenizer, plain, length=length)
        if row.get("prompt_token_ids") is not None:
            return TokensPrompt(prompt_token_ids=row["prompt_token_ids"])
        return row.get("prompt", "")

    def _finish(self, output: RequestOutput) -> None:
        answer = self._waiting.pop(output.request_id)
        if answer.done():  # its batch was cancelled
            return
        try:
            check_finished([output])
        except JaxLLMError as error:
            answer.set_result(_Answer(error=str(error)))
        else:
            (one,) = output.outputs
            answer.set_result(_Answer(one.text, one.token_ids, one.finish_reason))

    async def _step(self) -> None:
        """Run the engine while it has work, and yield to other batches after each step."""
        try:
            while self._engine.has_unfinished_requests():
                self._engine.step()
                await asyncio.sleep(0)
        except Exception as error:
            # Pass the error to all waiting rows.
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)
            raise
        finally:
            self._stepping = None


def _check_columns(names: list[str]) -> None:
    if not set(PROMPT_COLUMNS) & set(names):
        raise ValidationError(
            f"the dataset has the columns {names}, and none of {', '.join(PROMPT_COLUMNS)}"
        )
    taken = set(ANSWER_COLUMNS) & set(names)
    if taken:
        raise ValidationError(
            f"the dataset has the columns {sorted(taken)} already; rename or drop them"
        )
