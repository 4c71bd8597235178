"""/classify: the class of each input, and the probabilities of all classes."""

from functools import partial
from typing import Literal

import msgspec

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


class ClassificationRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for classes."""

    def work(self, served: ServedModel) -> Work:
        return Work(
            prompts=self.prompts(served),
            task="classify",
            params=PoolingParams(use_activation=self.use_activation),
            options=self.options,
            answer=partial(self._answer, served),
        )

    def _answer(
        self, served: ServedModel, answer_id: str, created: int, outputs: Outputs
    ) -> "Classification":
        labels = pooling_of(served).labels
        data = []
        for index, output in enumerate(outputs):
            probs = data_of(output)
            label = labels[int(probs.argmax())]
            data.append(
                ClassOf(index=index, label=label, probs=probs.tolist(), num_classes=len(probs))
            )
        return Classification(
            id=f"classify-{self.request_id or answer_id}",
            created=created,
            model=served.names[0],
            data=data,
            usage=PoolingUsage.of(outputs),
        )


class ClassOf(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(msgspec.Struct, kw_only=True):
    """Classes, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassOf]
    usage: PoolingUsage
