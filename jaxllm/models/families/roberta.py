"""RoBERTa and XLM-R, such as multilingual E5, BGE M3 and BGE rerankers: BERT without types.

Their positions begin behind that of the padding token.
"""

import dataclasses

from jaxllm.layers.dense import DenseSpec
from jaxllm.models.families.bert import names_within, read_bert
from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.specs import Architecture


def read(name: str, config: HFConfig) -> Architecture:
    return read_bert(name, config, first_position=config.integer("pad_token_id", 1, lowest=0) + 1)


def classifier(architecture: Architecture, num_labels: int) -> tuple[DenseSpec, ...]:
    size = architecture.hidden_size
    return (
        DenseSpec(name="dense", out_size=size, bias=True, activation="tanh"),
        DenseSpec(name="out_proj", out_size=num_labels, bias=True),
    )


_BERT = names_within("roberta")
NAMES = dataclasses.replace(
    _BERT.with_names(dense="classifier.dense", out_proj="classifier.out_proj"),
    ignored=(*_BERT.ignored, r"lm_head\..*"),
)
FAMILY = Family(
    read=read,
    checkpoint=lambda architecture: NAMES,
    tiny={"architectures": ["RobertaModel"], "model_type": "roberta"},
    is_encoder=True,
    pools_by="CLS",
    classifier=classifier,
)
