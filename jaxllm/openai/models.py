"""The served models, as /v1/models lists them."""

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    """One name of a model. The fields from `root` on are vLLM's."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "jaxllm"
    root: str
    parent: str | None = None  # of an adapter: the model that it changes
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """All names of the model."""

    object: str = "list"
    data: list[ModelCard]
