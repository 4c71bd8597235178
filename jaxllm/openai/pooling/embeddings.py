"""/v1/embeddings: a vector for each input. /pooling: whatever a task names, as it is."""

import base64
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from jaxllm.openai.pooling.fields import (
    InputFields,
    Outputs,
    PoolingUsage,
    Work,
    data_of,
    pooling_of,
)
from jaxllm.openai.served_model import ServedModel
from jaxllm.pooling_params import PoolingParams


class EmbeddingRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for embeddings."""

    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    # Those of vLLM's values that are OpenAI's.
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["little", "native"] | None = None

    def work(self, served: ServedModel) -> Work:
        return Work(
            prompts=self.prompts(served),
            task="embed",
            params=PoolingParams(use_activation=self.use_activation, dimensions=self.dimensions),
            options=self.options,
            answer=partial(self._answer, served),
        )

    def _answer(
        self, served: ServedModel, answer_id: str, created: int, outputs: Outputs
    ) -> "Embeddings":
        return Embeddings(
            id=f"embd-{self.request_id or answer_id}",
            created=created,
            model=served.names[0],
            data=[
                Embedding(index=index, embedding=encoded(data_of(output), self.encoding_format))
                for index, output in enumerate(outputs)
            ],
            usage=PoolingUsage.of(outputs),
        )


class Embedding(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class Embeddings(msgspec.Struct, kw_only=True):
    """Embeddings, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class PoolRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for what a task names: by default vectors at every token."""

    task: Any = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["little", "native"] | None = None

    def work(self, served: ServedModel) -> Work:
        of_tokens = pooling_of(served).tasks[1]
        return Work(
            prompts=self.prompts(served),
            task=None,
            params=PoolingParams(
                task=of_tokens if self.task is None else self.task,
                use_activation=self.use_activation,
                dimensions=self.dimensions,
            ),
            options=self.options,
            answer=partial(self._answer, served),
        )

    def _answer(
        self, served: ServedModel, answer_id: str, created: int, outputs: Outputs
    ) -> "Pooled":
        return Pooled(
            id=f"pool-{self.request_id or answer_id}",
            created=created,
            model=served.names[0],
            data=[
                PooledItem(index=index, data=encoded(data_of(output), self.encoding_format))
                for index, output in enumerate(outputs)
            ],
            usage=PoolingUsage.of(outputs),
        )


class PooledItem(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[Any] | str  # numbers, or one list of them for each token


class Pooled(msgspec.Struct, kw_only=True):
    """What was pooled, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PooledItem]
    usage: PoolingUsage


def encoded(vectors: np.ndarray, how: str | None) -> Any:
    """Numbers, or the bytes of float32 numbers, little-endian on every machine, in base64."""
    if how == "base64":
        return base64.b64encode(vectors.astype("<f4").tobytes()).decode()
    return vectors.tolist()
