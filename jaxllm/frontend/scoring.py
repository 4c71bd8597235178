"""Scores of pairs of texts: which prompts an engine pools for them, and how vectors become scores.

A model that classifies reads both texts together, and has one class: its probability is the score.
A model that embeds reads each text alone, and the score is the cosine of their vectors.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.pooling_length import TextPair
from jaxllm.frontend.tokenizer import Tokenizer, render_chat
from jaxllm.outputs import (
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxllm.pooler_config import Pooling
from jaxllm.pooling_params import PoolingTask
from jaxllm.prompts import PromptType

# Writes a pair as one text, by a chat template.
Render = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Scoring:
    """The prompts that are to be pooled. Of their vectors, pair i has those at `pairs[i]`."""

    task: PoolingTask
    prompts: list[PromptType | TextPair]
    pairs: list[tuple[int, ...]]

    def score(self, vectors: Sequence[np.ndarray]) -> float:
        """The score of a pair, from the vectors of its prompts."""
        if self.task == "classify":
            return float(vectors[0][0])
        return float(np.dot(*map(_unit, vectors)))


def plan_scores(
    pooling: Pooling, queries: Sequence[str], documents: Sequence[str], render: Render | None = None
) -> Scoring:
    """Decide what is pooled for the scores of 1 query with N documents, or of N pairs."""
    for name, texts in (("data_1", queries), ("data_2", documents)):
        if not texts:
            raise refused(name, list(texts), "give at least one text")
        for text in texts:
            if not isinstance(text, str):
                raise refused(name, text, "it must be a text")
    if len(queries) not in (1, len(documents)):
        raise refused(
            "data_1",
            f"{len(queries)} texts",
            f"give one, or one for each of the {len(documents)} texts of data_2",
        )
    each = list(queries) * (len(documents) if len(queries) == 1 else 1)
    if pooling.is_embedding:
        if render is not None:
            raise ValidationError(
                "chat_template: the model embeds each text alone, so there is no pair to write",
                parameter="chat_template",
            )
        texts = list(dict.fromkeys([*queries, *documents]))
        place = {text: index for index, text in enumerate(texts)}
        pairs = [(place[a], place[b]) for a, b in zip(each, documents, strict=True)]
        return Scoring("embed", list(texts), pairs)
    if pooling.size != 1:
        raise ValidationError(
            f"the model tells {pooling.size} classes apart; only one of a single class scores "
            "pairs. Use classify",
            parameter="task",
        )
    prompts: list[PromptType | TextPair] = []
    for a, b in zip(each, documents, strict=True):
        if render is not None:
            prompts.append(render(a, b))
        else:  # encoders have a mark between the two, decoders read on
            prompts.append(TextPair(first=a, second=b) if pooling.sees_all else a + b)
    return Scoring("classify", prompts, [(index,) for index in range(len(prompts))])


def pair_renderer(
    tokenizer: Tokenizer | None, chat_template: str, instruction: str | None = None
) -> Render:
    """What writes a pair by a template, which gets messages of the roles query and document, and
    the instruction, if there is one, as a variable of this name."""
    if tokenizer is None:
        raise ValidationError("chat_template needs a tokenizer, but skip_tokenizer_init=True")

    def render(query: str, document: str) -> str:
        messages = [
            {"role": "query", "content": query},
            {"role": "document", "content": document},
        ]
        prompt = render_chat(
            tokenizer,
            messages,
            chat_template=chat_template,
            add_generation_prompt=False,
            chat_template_kwargs=None if instruction is None else {"instruction": instruction},
        )
        return prompt.get("prompt", "")

    return render


def scored(
    scoring: Scoring, outputs: Sequence[PoolingRequestOutput[PoolingOutput | None]]
) -> list[ScoringRequestOutput]:
    """The output of each pair. That of two texts has the tokens of both."""
    found = []
    for pair in scoring.pairs:
        its = [outputs[place] for place in pair]
        errors = [one.error for one in its if one.error is not None]
        score = None if errors else ScoringOutput(scoring.score([_data(one) for one in its]))
        found.append(
            dataclasses.replace(
                its[-1],
                outputs=score,
                prompt_token_ids=[token for one in its for token in one.prompt_token_ids],
                num_cached_tokens=sum(one.num_cached_tokens for one in its),
                error=errors[0] if errors else None,
            )
        )
    return found


def _data(output: PoolingRequestOutput[PoolingOutput | None]) -> np.ndarray:
    assert output.outputs is not None, output.error
    return output.outputs.data


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / max(float(np.linalg.norm(vector)), 1e-12)
