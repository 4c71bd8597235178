"""Refuses forms that cannot be followed, before a request reaches the engine."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping

from jaxllm.errors import ValidationError
from jaxllm.parsers.reasoning.base import ReasoningFormat, Start
from jaxllm.structured_output.compile import compile_grammar
from jaxllm.structured_output.grammars import make_grammar
from jaxllm.structured_output.options import StructuredOutputsConfig
from jaxllm.structured_output.params import StructuredOutputsParams
from jaxllm.structured_output.vocabulary import Vocabulary
from jaxllm.structured_output.writer import BadPart, Grammar

MAX_KNOWN = 1024  # grammars whose outcome is kept


class Door:
    """Makes grammars of requests' forms, and tries them. Threads may share it."""

    def __init__(
        self,
        config: StructuredOutputsConfig,
        vocabulary: Vocabulary,
        added_tokens: Mapping[str, int],
    ):
        """`added_tokens` are the tokens with names that the tokenizer looks for in texts."""
        is_special = vocabulary.tokenizer.is_special_token
        self._special_tokens = {
            name: token_id
            for name, token_id in added_tokens.items()
            if name and token_id < vocabulary.size and is_special(token_id)
        }
        self._config = config
        self._vocabulary = vocabulary
        self._known = _Known()

    def grammar(
        self,
        params: StructuredOutputsParams,
        reasoning: tuple[ReasoningFormat, Start] | None = None,
    ) -> str:
        """Return the grammar of a form, after this reasoning; raise ValidationError with the field
        that cannot be followed. This may take some tenths of a second."""
        if self._config.enable_in_reasoning:
            reasoning = None
        try:
            grammar = make_grammar(params, self._config, self._special_tokens, reasoning)
            self._try(grammar, f"structured_outputs.{params.kind}")
        except BadPart as bad:
            raise ValidationError(f"{bad.field}: {bad}", parameter=bad.field) from None
        return grammar.text

    def _try(self, grammar: Grammar, field: str) -> None:
        why = self._known.outcome(grammar.text, self._compile)
        if why is None:
            return
        for part in grammar.parts:
            of_part = self._known.outcome(part.text, self._compile)
            if of_part is not None:
                raise BadPart(part.field, of_part)
        raise BadPart(field, why)

    def _compile(self, text: str) -> str | None:
        """Why a grammar cannot be followed; None if it can."""
        try:
            compile_grammar(self._vocabulary, text)
        except ValueError as error:
            why = str(error)
            return next((ours for theirs, ours in _IN_OUR_WORDS.items() if theirs in why), why)
        return None


# llguidance's reasons that name what a request cannot change.
_IN_OUR_WORDS = {
    "oneOf constraints are not supported": (
        "oneOf whose members may fit the same value cannot be followed; use anyOf"
    ),
    "NoExtensionBias": "no answer fits it",
}


class _Known:
    """The outcomes of the grammars that were tried last."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()

    def outcome(self, text: str, compile: Callable[[str], str | None]) -> str | None:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if digest in self._outcomes:
                self._outcomes.move_to_end(digest)
                return self._outcomes[digest]
        why = compile(text)
        with self._lock:
            self._outcomes[digest] = why
            while len(self._outcomes) > MAX_KNOWN:
                self._outcomes.popitem(last=False)
        return why
