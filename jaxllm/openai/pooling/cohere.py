"""/v2/embed: embeddings in Cohere's protocol."""

from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.pooling_length import TextOptions
from jaxllm.openai.fields import read_fields
from jaxllm.openai.pooling.embeddings import encoded
from jaxllm.openai.pooling.fields import MAX_INPUTS, Outputs, Work, data_of, pooling_of
from jaxllm.openai.served_model import ServedModel
from jaxllm.openai.wording import renamed
from jaxllm.pooler_config import Pooling
from jaxllm.pooling_params import PoolingParams

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]

# Cohere's names of purposes -> what models call them.
_PURPOSES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}


class CohereEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for embeddings in Cohere's protocol."""

    model: str | None = None
    texts: list[str] | None = None
    inputs: list[Any] | None = None  # objects with parts of type text
    images: list[Any] | None = None
    input_type: str | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: int | None = None
    priority: int | None = None

    @classmethod
    def read(cls, body: object) -> "CohereEmbedRequest":
        return read_fields(body, cls)

    @property
    def num_prompts(self) -> int:
        return len(self._texts)

    @property
    def conversation(self) -> None:
        return None

    @property
    def request_id(self) -> None:
        return None

    def work(self, served: ServedModel) -> Work:
        texts = self._texts
        before = _words(pooling_of(served), self.input_type)
        truncate = self.truncate or "END"
        kept = -1 if self.max_tokens is None else self.max_tokens
        return Work(
            prompts=[before + text for text in texts],
            task="embed",
            params=PoolingParams(dimensions=self.output_dimension),
            options=TextOptions(
                truncate_prompt_tokens=None if truncate == "NONE" else kept,
                truncation_side="left" if truncate == "START" else "right",
            ),
            answer=partial(self._answer, texts),
        )

    def in_its_words(self, error: ValidationError, place: int | None = None) -> ValidationError:
        name = "texts" if place is None else f"texts[{place}]"
        names = {"prompt": name, "dimensions": "output_dimension"}
        return renamed(error, names | {"truncate_prompt_tokens": "max_tokens"})

    @property
    def _texts(self) -> list[str]:
        if self.images is not None:
            raise refused("images", f"{len(self.images)} images", "the model reads texts only")
        if (self.texts is None) == (self.inputs is None):
            raise ValidationError("give texts or inputs", parameter="texts")
        texts = self.texts
        if texts is None:
            texts = [_text_of(place, one) for place, one in enumerate(self.inputs or ())]
        if not 0 < len(texts) <= MAX_INPUTS:
            raise refused("texts", f"{len(texts)} texts", f"give from 1 to {MAX_INPUTS}")
        return texts

    def _answer(
        self, texts: list[str], answer_id: str, created: int, outputs: Outputs
    ) -> "CohereEmbeddings":
        vectors = np.stack([data_of(output) for output in outputs])
        kinds = self.embedding_types or ["float"]
        return CohereEmbeddings(
            id=answer_id,
            embeddings=ByType(**{_field(kind): _as_type(vectors, kind) for kind in kinds}),
            texts=texts,
            meta=Meta(
                billed_units=BilledUnits(
                    input_tokens=sum(len(output.prompt_token_ids) for output in outputs)
                )
            ),
        )


class ByType(msgspec.Struct, kw_only=True, rename={"float_": "float"}):
    float_: list[list[float]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET


class ApiVersion(msgspec.Struct, frozen=True):
    version: str = "2"


class BilledUnits(msgspec.Struct):
    input_tokens: int


class Meta(msgspec.Struct, kw_only=True):
    api_version: ApiVersion = ApiVersion()
    billed_units: BilledUnits


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    """Embeddings by type, in the order of the texts."""

    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    id: str
    embeddings: ByType
    texts: list[str]
    meta: Meta


def _field(kind: EmbeddingType) -> str:
    return "float_" if kind == "float" else kind


def _as_type(vectors: np.ndarray, kind: EmbeddingType) -> Any:
    if kind == "float":
        return vectors.tolist()
    if kind == "base64":
        return [encoded(vector, "base64") for vector in vectors]
    bits = np.packbits(vectors > 0, axis=1)  # the first number has the most significant bit
    if kind == "ubinary":
        return bits.tolist()
    return (bits.astype(np.int16) - 128).tolist()


def _words(pooling: Pooling, purpose: str | None) -> str:
    """What the model puts before texts of a purpose; models without such words put nothing."""
    known = dict(pooling.prompts)
    for name in _PURPOSES.get(purpose or "", (purpose,)):
        if name in known:
            return known[name]
    return ""


def _text_of(place: int, given: object) -> str:
    parts = given.get("content") if isinstance(given, dict) else None
    if isinstance(parts, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
    ):
        return "\n".join(part["text"] for part in parts)
    raise refused(f"inputs[{place}]", given, "it must have content of parts of type 'text'")
