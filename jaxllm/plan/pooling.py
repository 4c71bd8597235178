"""Decides whether an engine pools, and how: by the model's files, and by what the user says."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.errors import (
    CheckpointError,
    UnsupportedModelError,
    ValidationError,
    refused,
    shown,
)
from jaxllm.files import read_json
from jaxllm.layers.dense import DenseSpec
from jaxllm.models.architecture import read_architecture
from jaxllm.models.hf_config import merge_overrides
from jaxllm.models.pooling_head import PoolingHeadSpec
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.specs import Architecture
from jaxllm.plan.images import wants_images
from jaxllm.pooler_config import PoolerConfig, Pooling, PoolingConfig, SeqPooling
from jaxllm.pooling.files import SentenceModel, read_sentence_model

Activation = Literal["softmax", "sigmoid", "none"]

_CLASSIFIER = "ForSequenceClassification"
# It scores each step of an answer, by two layers.
_PROCESS_REWARD = "ForProcessRewardModel"
_MAX_CLASSES = 1 << 16
_MAX_TOKENIZER_BYTES = 1 << 28
# Fields in which a cross-encoder names its activation, and what they may say.
_ACTIVATION_FIELDS = ("activation_fn", "sbert_ce_default_activation_function")
_ACTIVATIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}


class _Chosen(NamedTuple):
    pooling: Pooling
    head: PoolingHeadSpec


def read_model(
    config: EngineConfig, hf_config: Mapping[str, Any], model_dir: Path
) -> tuple[Architecture, Pooling | None]:
    """Read what a model computes, and how the engine pools it; None: it generates."""
    merged = merge_overrides(hf_config, config.model.hf_overrides or {})
    pools = _pools(config.pooling, merged, model_dir)
    sentence = read_sentence_model(model_dir) if pools else None
    longest = None if sentence is None else sentence.max_seq_length
    architecture = read_architecture(
        merged,
        max_model_len=config.model.max_model_len or longest,
        quantization=config.model.quantization,
        pools=pools,
        sees_images=not pools and wants_images(config),
    )
    if not pools:
        return architecture, None
    is_encoder = architecture.is_encoder
    _check(config, is_encoder)
    pooling, head = _choose(config, architecture, model_dir, sentence)
    if longest is not None and config.model.max_model_len is None:
        longest = min(longest, architecture.max_model_len)
        architecture = dataclasses.replace(architecture, max_model_len=longest)
    pooling = msgspec.structs.replace(
        pooling, sees_all=is_encoder, num_token_types=architecture.num_token_types
    )
    return dataclasses.replace(architecture, pooling_head=head), pooling


def _pools(config: PoolingConfig, hf_config: Mapping[str, Any], model_dir: Path) -> bool:
    """Whether the engine pools."""
    if config.runner == "pooling":
        return True
    if config.runner == "auto":
        names = [str(name) for name in hf_config.get("architectures") or ()]
        if any(map(_is_headless, names)) or read_sentence_model(model_dir) is not None:
            return True
    for name, neutral in (("convert", ("auto", "none")), ("pooler_config", (None, {}))):
        if (value := getattr(config, name)) not in neutral:
            raise refused(name, value, "the engine generates; start it with runner='pooling'")
    return False


def _is_headless(name: str) -> bool:
    return name.endswith((_CLASSIFIER, "Model")) and not name.endswith("LMHeadModel")


def _check(config: EngineConfig, is_encoder: bool) -> None:
    """Refuse what does not go with an engine that pools."""
    if is_encoder and config.cache.enable_prefix_caching:
        raise refused(
            "enable_prefix_caching",
            True,
            "the model is an encoder: what it computes of a token depends on those behind it; "
            "leave it out",
        )
    if is_encoder and config.cache.kv_cache_dtype != "auto":
        raise refused(
            "kv_cache_dtype",
            config.cache.kv_cache_dtype,
            "the model is an encoder, which caches no keys and values; leave it out",
        )
    if config.speculation.read() is not None:
        raise ValidationError(
            "speculative_config: the engine pools (runner='pooling') and generates nothing that "
            "could be drafted; leave it out",
            parameter="speculative_config",
        )
    if config.model.logits_processors:
        raise refused(
            "logits_processors",
            config.model.logits_processors,
            "the engine pools (runner='pooling') and samples no tokens; leave it out",
        )


def _choose(
    config: EngineConfig,
    architecture: Architecture,
    model_dir: Path,
    sentence: SentenceModel | None,
) -> _Chosen:
    hf_config, asked = architecture.hf_config, config.pooling.read()
    family = ModelRegistry.family(architecture.name)
    convert = config.pooling.convert
    names = [str(name) for name in hf_config.get("architectures") or ()]
    steps = any(name.endswith(_PROCESS_REWARD) for name in names)
    by_logits = sentence is None and not steps and not any(map(_is_headless, names))
    by_logits = by_logits and asked.returned_token_ids
    if convert in ("auto", "none"):
        classifies = steps or by_logits or any(_CLASSIFIER in name for name in names)
        convert = "classify" if classifies else "embed"
    usual: SeqPooling = family.pools_by
    if convert == "classify" and hf_config.get("classifier_pooling") == "mean":
        usual = "MEAN"
    how: SeqPooling = asked.of_sequences or (sentence.seq_pooling if sentence else usual)
    if convert == "classify" and by_logits:
        pooling, head = _by_logits(architecture, tuple(by_logits), how)
    elif convert == "classify":
        pooling, head = _classifier(architecture, model_dir, how, steps=steps)
    else:
        pooling, head = _embedder(architecture, sentence, how)
    tag, size = asked.step_tag_id, architecture.vocab_size
    if tag is not None and tag >= size:
        why = f"no such token; ids of this model are below {size}"
        raise refused("pooler_config.step_tag_id", tag, why)
    changes: dict[str, Any] = _step_pooling(asked, pooling, steps=steps)
    if asked.task is not None:
        if asked.task not in pooling.tasks:
            known = " and ".join(pooling.tasks)
            raise refused("pooler_config.task", asked.task, f"the model is run for {known}")
        changes["default_task"] = asked.task
    if asked.use_activation is not None:
        changes["use_activation"] = asked.use_activation
    if asked.dimensions is not None:
        pooling.check_dimensions(asked.dimensions)
        changes["dimensions"] = asked.dimensions
    return _Chosen(msgspec.structs.replace(pooling, **changes), head)


def _step_pooling(asked: PoolerConfig, pooling: Pooling, *, steps: bool) -> dict[str, Any]:
    """What is pooled at tokens. `steps` says whether the model is one that scores steps."""
    how = asked.of_tokens or ("STEP" if steps else "ALL")
    changes: dict[str, Any] = {"tok_pooling": how}
    if how == "STEP":
        changes["default_task"] = pooling.tasks[1]
    for name in ("step_tag_id", "returned_token_ids"):
        if (value := getattr(asked, name)) is None:
            continue
        if how != "STEP":
            raise refused(f"pooler_config.{name}", value, "it needs pooling_type 'STEP'")
        changes[name] = tuple(value) if isinstance(value, list | tuple) else value
    if asked.returned_token_ids is not None:
        pooling.columns(asked.returned_token_ids)  # refuses
    return changes


def _embedder(
    architecture: Architecture, sentence: SentenceModel | None, how: SeqPooling
) -> _Chosen:
    denses = () if sentence is None else sentence.denses
    head = PoolingHeadSpec(
        layers=tuple(
            DenseSpec(
                name=f"dense_{index}",
                out_size=dense.out_size,
                bias=dense.bias,
                activation=dense.activation,
                folder=dense.path,
            )
            for index, dense in enumerate(denses)
        )
    )
    hf_config = architecture.hf_config
    cuts = hf_config.get("matryoshka_dimensions") or ()
    pooling = Pooling(
        tasks=("embed", "token_embed"),
        default_task="embed",
        seq_pooling=how,
        size=head.size(architecture.hidden_size),
        activation="normalize",
        use_activation=sentence is None or sentence.normalizes,
        may_be_cut=bool(hf_config.get("is_matryoshka")) and not cuts,
        cuts=tuple(cuts),
        dimensions=None if sentence is None else sentence.truncate_dim,
        prompts=() if sentence is None else sentence.prompts,
    )
    return _Chosen(pooling, head)


def _by_logits(architecture: Architecture, tokens: tuple[int, ...], how: SeqPooling) -> _Chosen:
    """A model whose logits of some tokens are its scores."""
    worst = max(tokens)
    if worst >= architecture.vocab_size:
        raise refused(
            "pooler_config.returned_token_ids",
            worst,
            f"no such token; ids of this model are below {architecture.vocab_size}",
        )
    pooling = Pooling(
        tasks=("classify", "token_classify"),
        default_task="classify",
        seq_pooling=how,
        size=len(tokens),
        activation="sigmoid" if len(tokens) == 1 else "softmax",
        labels=tuple(f"LABEL_{index}" for index in range(len(tokens))),
        scored_tokens=tokens,
    )
    return _Chosen(pooling, PoolingHeadSpec(logits=tokens))


def _classifier(
    architecture: Architecture, model_dir: Path, how: SeqPooling, *, steps: bool
) -> _Chosen:
    hf_config = architecture.hf_config
    if (words := hf_config.get("classifier_from_token")) is not None:
        head, labels = _by_tokens(words, model_dir, architecture.vocab_size), ("LABEL_0",)
    else:
        labels = _labels(hf_config)
        layers: tuple[Any, ...]
        if steps:
            layers = _process_reward(architecture.hidden_size, len(labels))
        else:
            layers = ModelRegistry.family(architecture.name).classifier(architecture, len(labels))
        head = PoolingHeadSpec(layers=layers)
    pooling = Pooling(
        tasks=("classify", "token_classify"),
        default_task="classify",
        seq_pooling=how,
        size=len(labels),
        activation=_activation(hf_config, len(labels)),
        labels=labels,
    )
    return _Chosen(pooling, head)


def _process_reward(hidden_size: int, num_labels: int) -> tuple[DenseSpec, ...]:
    """The layers that score a step, as Qwen's models have them."""
    size = hidden_size
    return (
        DenseSpec(
            name="score_in", out_size=size, bias=True, activation="relu", stored_as="score.0"
        ),
        DenseSpec(name="score_out", out_size=num_labels, bias=True, stored_as="score.2"),
    )


def _by_tokens(words: object, model_dir: Path, vocab_size: int) -> PoolingHeadSpec:
    """The head of a reranker that answers with one of two tokens, such as ["no", "yes"]."""
    if not (isinstance(words, list | tuple) and len(words) == 2):
        raise CheckpointError(f"classifier_from_token={shown(words)} must be a list of two tokens")
    told = read_json(model_dir / "tokenizer.json", most=_MAX_TOKENIZER_BYTES)
    vocabulary = (told.get("model") or {}).get("vocab")
    ids = vocabulary if isinstance(vocabulary, dict) else {}
    unknown = [word for word in words if not isinstance(ids.get(word), int)]
    if unknown:
        raise CheckpointError(f"classifier_from_token: tokenizer.json has no token {unknown[0]!r}")
    no, yes = (ids[word] for word in words)
    if max(no, yes) >= vocab_size:
        raise CheckpointError(
            f"classifier_from_token={shown(words)} are tokens {no} and {yes} of tokenizer.json, "
            f"which must be below vocab_size={vocab_size}"
        )
    return PoolingHeadSpec(tokens=(yes, no))


def _labels(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes."""
    named, count = hf_config.get("id2label"), hf_config.get("num_labels")
    if isinstance(named, dict) and count in (None, len(named)):
        try:
            return tuple(str(named[key]) for key in sorted(named, key=int))
        except ValueError as error:
            raise CheckpointError(f"config.json: id2label={shown(named)}: {error}") from None
    count = 2 if count is None else count  # as in transformers
    if not isinstance(count, int) or not 1 <= count <= _MAX_CLASSES:
        raise CheckpointError(f"config.json: num_labels={shown(count)} must be an integer from 1")
    return tuple(f"LABEL_{index}" for index in range(count))


def _activation(hf_config: Mapping[str, Any], num_labels: int) -> Activation:
    """What makes probabilities of the scores of classes."""
    told = hf_config.get("sentence_transformers") or {}
    for name in _ACTIVATION_FIELDS:
        function = told.get(name) if isinstance(told, dict) else None
        function = function or hf_config.get(name)
        if function is not None:
            kind = _ACTIVATIONS.get(str(function).rpartition(".")[2])
            if kind is None:
                raise UnsupportedModelError(
                    f"config.json: {name}={shown(function)} is not supported; supported are "
                    f"{' and '.join(_ACTIVATIONS)}"
                )
            return kind
    problem = hf_config.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"
