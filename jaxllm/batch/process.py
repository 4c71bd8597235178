"""Lines as requests to an engine: validated and tokenized, in the engine's numbering."""

import hashlib
from collections.abc import Callable
from typing import Protocol

from jaxllm.batch.lines import Line, PooledPrompts, Prompts
from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError
from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.frontend.pooling_input import PoolingInput


class Engine(Protocol):
    """The attributes of any kind of engine that are needed here."""

    config: EngineConfig
    pooling_input: PoolingInput

    @property
    def process_input(self) -> Callable[..., ProcessedInput]: ...


def processed(
    engine: Engine, prompts: Prompts | PooledPrompts, line: Line, number: int, name: str
) -> list[ProcessedInput]:
    """Validate and tokenize the prompts of a line, as requests `name`-0 and so on.

    A request without a seed gets one by its place in the batch, so that its answer does not depend
    on where an earlier run was killed.
    """
    is_pooled = isinstance(prompts, PooledPrompts)
    inputs = []
    for place, prompt in enumerate(prompts.work.prompts if is_pooled else prompts.prompts):
        request_id = f"{name}-{place}"
        try:
            if is_pooled:
                work = prompts.work
                one = engine.pooling_input.process(
                    request_id,
                    prompt,
                    work.params,
                    task=work.task,
                    priority=prompts.priority,
                    options=work.options,
                    lora_request=prompts.lora_request,
                )
            else:
                params = prompts.params
                if params.seed is None:
                    params = params.clone(seed=_seed(engine.config.model.seed, number, place))
                truncate = prompts.truncate_prompt_tokens
                one = engine.process_input(
                    request_id,
                    prompt,
                    params,
                    priority=prompts.priority,
                    tokenization_kwargs=None
                    if truncate is None
                    else {"truncate_prompt_tokens": truncate},
                    reasoning=prompts.reasoning,
                    lora_request=prompts.lora_request,
                )
        except ValidationError as error:
            raise line.in_its_words(error, place) from error
        inputs.append(one)
    return inputs


def _seed(seed: int, number: int, place: int) -> int:
    digest = hashlib.blake2b(f"{seed} {number} {place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
