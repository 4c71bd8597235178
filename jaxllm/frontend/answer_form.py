"""The form of an answer: from sampling parameters to the grammar in an EngineRequest."""

import functools
import threading

from jaxllm.config import EngineConfig
from jaxllm.errors import refused
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.messages import EngineInfo
from jaxllm.parsers.reasoning.base import Reasoning
from jaxllm.parsers.reasoning.registry import find_reasoning_format
from jaxllm.structured_output.options import StructuredOutputsConfig
from jaxllm.structured_output.params import StructuredOutputsParams

# Tokens at the end of a prompt without text in which a tag of the reasoning may be.
_NUM_LAST_TOKENS = 32


class AnswerForms:
    """Makes the grammars of requests. The first one loads the vocabulary, and llguidance."""

    def __init__(self, config: EngineConfig, info: EngineInfo, tokenizer: Tokenizer | None):
        self._model = config.model
        self._config = StructuredOutputsConfig.of(config.model.structured_outputs_config)
        self._info = info
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def grammar(
        self,
        params: StructuredOutputsParams | None,
        prompt: str | None,
        prompt_token_ids: list[int],
        reasoning: Reasoning | None,
    ) -> str | None:
        """Return the grammar of an answer to this prompt; raise ValidationError."""
        if params is None:
            return None
        if self._tokenizer is None:
            raise refused(
                "structured_outputs",
                params,
                "there is no tokenizer (skip_tokenizer_init=True); a form needs the text of tokens",
            )
        with self._lock:
            door = self._door
        if reasoning is None and self._config.reasoning_parser:
            reasoning = Reasoning(find_reasoning_format(self._config.reasoning_parser))
        if reasoning is None:
            return door.grammar(params)
        reasoning_format, enable_thinking = reasoning
        if prompt is None:
            last = prompt_token_ids[-_NUM_LAST_TOKENS:]
            prompt = self._tokenizer.decode(last, skip_special_tokens=False)
        start = reasoning_format.start(prompt, enable_thinking)
        return door.grammar(params, (reasoning_format, start))

    @functools.cached_property
    def _door(self):  # noqa: ANN202
        from jaxllm.structured_output.door import Door
        from jaxllm.structured_output.vocabulary import load_vocabulary

        assert self._tokenizer is not None
        added = self._tokenizer.hf.added_tokens_decoder
        return Door(
            self._config,
            load_vocabulary(self._model, self._info),
            {str(token): token_id for token_id, token in added.items()},
        )
