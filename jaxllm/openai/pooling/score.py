"""/score: how well texts go together. /rerank: documents in the order of their scores."""

from functools import partial
from typing import Any, Literal

import msgspec

from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.pooling_length import head_of
from jaxllm.frontend.scoring import Render, Scoring, pair_renderer, plan_scores, scored
from jaxllm.openai.errors import AnswerError
from jaxllm.openai.pooling.fields import (
    MAX_INPUTS,
    Outputs,
    PoolingFields,
    PoolingUsage,
    Work,
    pooling_of,
)
from jaxllm.openai.served_model import ServedModel
from jaxllm.pooling_params import PoolingParams

# The names of the two sides: vLLM's, and those that it had before.
_SIDES = (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"))


class PairFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Requests for scores of pairs."""

    # Tokens that are left of each text; None or 0: all.
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None  # for a template that writes pairs

    def scoring(self, served: ServedModel, queries: list[str], documents: list[str]) -> Scoring:
        """Decide what is pooled for these texts."""
        tokenizer = served.tokenizer
        queries = head_of(
            tokenizer, "max_tokens_per_query", queries, self.max_tokens_per_query or 0
        )
        documents = head_of(
            tokenizer, "max_tokens_per_doc", documents, self.max_tokens_per_doc or 0
        )
        return plan_scores(pooling_of(served), queries, documents, self._render(served))

    def _render(self, served: ServedModel) -> Render | None:
        """What writes a pair as one text; None: the tokenizer joins them."""
        template, instruction = served.chat_template, self.instruction
        if template is None or pooling_of(served).is_embedding:
            if instruction is not None:
                why = "only a template has a place for it; start the server with --chat-template"
                if pooling_of(served).is_embedding:
                    why = "the model embeds each text alone, so there is no pair to write"
                raise refused("instruction", instruction, why)
            return None
        if instruction is not None and "instruction" not in template:
            raise refused("instruction", instruction, "the server's chat template does not know it")
        return pair_renderer(served.tokenizer, template, instruction)


class ScoreRequest(PairFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for scores: one text with one or several others, or pair by pair."""

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None

    @property
    def num_prompts(self) -> int:
        _, one, other = self._sides
        return len(one) + len(other)

    def work(self, served: ServedModel) -> Work:
        names, queries, documents = self._sides
        try:
            scoring = self.scoring(served, queries, documents)
        except ValidationError as error:
            raise self.in_its_words(error) from error
        return _work(self, scoring, partial(self._answer, served, scoring))

    def names_of_fields(self, place: int | None) -> dict[str, str]:
        (one, other), *_ = self._sides
        return {"data_1": one, "data_2": other, "prompt": f"{one} or {other}"}

    @property
    def _sides(self) -> tuple[tuple[str, str], list[str], list[str]]:
        """The names of the two sides, and their texts."""
        given = [pair for pair in _SIDES if any(getattr(self, name) is not None for name in pair)]
        if len(given) != 1 or any(getattr(self, name) is None for name in given[0]):
            ways = ", or ".join(" and ".join(pair) for pair in _SIDES)
            raise ValidationError(f"give {ways}", parameter="queries")
        texts = [getattr(self, name) for name in given[0]]
        one, other = ([text] if isinstance(text, str) else text for text in texts)
        for name, its in zip(given[0], (one, other), strict=True):
            _check_number(name, its)
        return given[0], one, other

    def _answer(
        self,
        served: ServedModel,
        scoring: Scoring,
        answer_id: str,
        created: int,
        outputs: Outputs,
    ) -> "Scores":
        return Scores(
            id=f"score-{self.request_id or answer_id}",
            created=created,
            model=served.names[0],
            data=[
                Score(index=index, score=score)
                for index, score in enumerate(_scores(scoring, outputs))
            ],
            usage=PoolingUsage.of(outputs),
        )


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(msgspec.Struct, kw_only=True):
    """Scores, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RerankRequest(PairFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to order documents."""

    query: str
    documents: list[Any]  # texts, or objects with a text
    top_n: int | None = None  # None or 0: all
    return_documents: bool | None = None  # they are always returned

    @property
    def num_prompts(self) -> int:
        return 1 + len(self.documents)

    @property
    def texts(self) -> list[str]:
        _check_number("documents", self.documents)
        texts = []
        for place, given in enumerate(self.documents):
            text = given.get("text") if isinstance(given, dict) else given
            if not isinstance(text, str):
                raise refused(f"documents[{place}]", given, "it must be a text, or have a 'text'")
            texts.append(text)
        return texts

    def work(self, served: ServedModel) -> Work:
        if self.top_n is not None and self.top_n < 0:
            raise refused("top_n", self.top_n, "it must be 0, for all, or more")
        texts = self.texts
        scoring = self.scoring(served, [self.query], texts)
        return _work(self, scoring, partial(self._answer, served, scoring, texts))

    def names_of_fields(self, place: int | None) -> dict[str, str]:
        return {"data_1": "query", "data_2": "documents", "prompt": "query or documents"}

    def _answer(
        self,
        served: ServedModel,
        scoring: Scoring,
        texts: list[str],
        answer_id: str,
        created: int,
        outputs: Outputs,
    ) -> "Reranked":
        found = [
            Ranked(index=index, document=Document(texts[index]), relevance_score=score)
            for index, score in enumerate(_scores(scoring, outputs))
        ]
        found.sort(key=lambda one: one.relevance_score, reverse=True)
        return Reranked(
            id=f"rerank-{self.request_id or answer_id}",
            model=served.names[0],
            usage=PoolingUsage.of(outputs),
            results=found[: self.top_n or None],
        )


class Document(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, kw_only=True):
    index: int
    document: Document
    relevance_score: float


class Reranked(msgspec.Struct, kw_only=True):
    """Documents, the best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]


def _work(request: PoolingFields, scoring: Scoring, answer: Any) -> Work:
    return Work(
        prompts=scoring.prompts,
        task=scoring.task,
        params=PoolingParams(use_activation=request.use_activation),
        options=request.options,
        answer=answer,
    )


def _scores(scoring: Scoring, outputs: Outputs) -> list[float]:
    found = []
    for output in scored(scoring, outputs):
        if output.outputs is None:
            raise AnswerError(f"the engine could not finish the answer: {output.error}")
        found.append(output.outputs.score)
    return found


def _check_number(name: str, texts: list[Any]) -> None:
    if not 0 < len(texts) <= MAX_INPUTS:
        raise refused(name, f"{len(texts)} texts", f"give from 1 to {MAX_INPUTS}")
