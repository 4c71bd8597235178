"""Prepares a run: makes its tokenizer and its token ids once, and keeps them."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxllm.errors import ValidationError, refused
from jaxllm.files import read_json
from jaxllm.logging import init_logger
from jaxllm.models.architecture import read_architecture
from jaxllm.training.adapter import AdapterModel
from jaxllm.training.corpus import read_corpus
from jaxllm.training.forward import RowModel
from jaxllm.training.options import AdapterOptions, DataOptions
from jaxllm.training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from jaxllm.training.tokens import TokenData, has_tokens, read_tokens, write_tokens
from jaxllm.weights.checkpoint import resolve_model_dir

logger = init_logger(__name__)


class Teacher(NamedTuple):
    model: RowModel
    weights: dict[str, jax.Array]


def prepare_data(options: DataOptions, tokenizer_folder: Path, data_folder: Path) -> TokenData:
    """Read the text, train a tokenizer if none is given, and tokenize, unless that is done."""
    if not has_tokens(data_folder):
        if not options.data:
            raise ValidationError("no data; give files or folders of text", parameter="data")
        documents = read_corpus(
            options.data, exclude=options.exclude, heldout_share=options.heldout_share
        )
        if len({d.is_heldout for d in documents}) < 2:
            raise refused(
                "heldout_share",
                options.heldout_share,
                f"of {len(documents)} files all or none would be held out; give more files or "
                "another share",
            )
        size = sum(d.num_bytes for d in documents)
        logger.info("%d files, %.1f MB of text", len(documents), size / 1e6)
        tokenizer = (
            train_tokenizer((d.text for d in documents if not d.is_heldout), options.vocab_size)
            if options.tokenizer is None
            else load_tokenizer(resolve_model_dir(options.tokenizer))
        )
        save_tokenizer(tokenizer, tokenizer_folder)
        write_tokens(data_folder, tokenizer, documents, chat=options.chat_examples)
    data = read_tokens(data_folder)
    logger.info("%d tokens, %d held out", len(data.train), len(data.heldout))
    return data


def load_teacher(name: str, tokenizer_folder: Path) -> Teacher:
    """Load a model to learn from. It must have the same tokens."""
    model_dir = resolve_model_dir(name)
    _check_tokens("teacher", name, tokenizer_folder, model_dir)
    model = RowModel(read_architecture(read_json(model_dir / "config.json")))
    return Teacher(model, model.load(model_dir))


def load_base(options: AdapterOptions, name: str, tokenizer_folder: Path) -> AdapterModel:
    """Load the model of an adapter. It must have the same tokens."""
    model_dir = resolve_model_dir(name)
    _check_tokens("lora", name, tokenizer_folder, model_dir)
    return AdapterModel(model_dir, options)


def load_initial_weights(
    name: str, model: RowModel, tokenizer_folder: Path
) -> dict[str, jax.Array]:
    """Load the weights of a model to continue. It must have the same tokens and the same
    architecture: shapes alone would not reveal another rotary embedding."""
    model_dir = resolve_model_dir(name)
    _check_tokens("initial_model", name, tokenizer_folder, model_dir)
    ours = model.architecture
    theirs = read_architecture(read_json(model_dir / "config.json"))
    other = next((d for d in _differences(ours, theirs) if d.field not in _MAY_DIFFER), None)
    if other is not None:
        why = f"it is another model than is trained: it has {other.field}={other.theirs!r}"
        raise refused("initial_model", name, f"{why}, not {other.ours!r}")
    return model.load(model_dir)


# Fields of an architecture that do not affect the computation.
_MAY_DIFFER = ("dtype", "eos_token_ids", "max_model_len")


class _Difference(NamedTuple):
    field: str
    ours: object
    theirs: object


def _differences(ours: Any, theirs: Any, field: str = "") -> Iterator[_Difference]:
    """The innermost fields in which two records differ, by their paths."""
    if ours == theirs:
        return
    if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        for inner in dataclasses.fields(ours):
            if inner.compare:
                path = f"{field}.{inner.name}" if field else inner.name
                yield from _differences(
                    getattr(ours, inner.name), getattr(theirs, inner.name), path
                )
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(*pair, f"{field}[{index}]")
    else:
        yield _Difference(field, ours, theirs)


def _check_tokens(parameter: str, name: str, tokenizer_folder: Path, model_dir: Path) -> None:
    ours, theirs = (load_tokenizer(folder) for folder in (tokenizer_folder, model_dir))
    if ours.get_vocab() != theirs.get_vocab():
        raise refused(parameter, name, "it has other tokens; give it as the tokenizer, too")
