"""Reads what a model's directory says of pooling, in the files of sentence-transformers."""

from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.errors import CheckpointError, UnsupportedModelError, shown
from jaxllm.files import parse_json, read_bytes, read_json
from jaxllm.pooler_config import SeqPooling

_MAX_BYTES = 1 << 20
_MODES: dict[str, SeqPooling] = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
# The functions behind a layer, as torch calls them.
_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"}
# The name of a mode in files that have a flag for each.
_FLAG = "pooling_mode_"


class Dense(NamedTuple):
    """A layer behind the pooling, with a file of its own."""

    path: str
    out_size: int
    bias: bool
    activation: str | None


class SentenceModel(NamedTuple):
    """A model as sentence-transformers describes it."""

    seq_pooling: SeqPooling
    normalizes: bool
    denses: tuple["Dense", ...]  # behind the pooling
    prompts: tuple[tuple[str, str], ...]
    max_seq_length: int | None
    truncate_dim: int | None


def read_sentence_model(model_dir: Path) -> SentenceModel | None:
    """Read the files; None if there are none, or they do not pool."""
    path = model_dir / "modules.json"
    if not path.is_file():
        return None
    modules = [_Module.of(path, entry) for entry in _read_list(path)]
    kinds = [module.kind for module in modules]
    if "Pooling" not in kinds:
        return None
    unknown = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize", "Dense"})
    if unknown:
        raise UnsupportedModelError(
            f"{path}: modules of type {', '.join(unknown):.80} are not supported; supported are "
            "Transformer, Pooling, Dense and Normalize"
        )
    pooling = modules[kinds.index("Pooling")]
    told = _read_optional(model_dir / "config_sentence_transformers.json")
    limits = _read_optional(model_dir / "sentence_bert_config.json")
    return SentenceModel(
        seq_pooling=_read_pooling(model_dir / pooling.path / "config.json"),
        normalizes="Normalize" in kinds,
        denses=tuple(
            _read_dense(model_dir, module.path) for module in modules if module.kind == "Dense"
        ),
        prompts=_read_prompts(model_dir, told.get("prompts")),
        max_seq_length=_positive(limits.get("max_seq_length")),
        truncate_dim=_positive(told.get("truncate_dim")),
    )


class _Module(NamedTuple):
    kind: str
    path: str

    @classmethod
    def of(cls, file: Path, entry: object) -> "_Module":
        kind = entry.get("type") if isinstance(entry, dict) else None
        path = entry.get("path", "") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or not isinstance(path, str):
            raise CheckpointError(f"{file}: {shown(entry)} must be an object with type and path")
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(f"{file}: path {path!r:.80} leaves the model's directory")
        return cls(kind.rpartition(".")[2], path)


def _read_pooling(path: Path) -> SeqPooling:
    config = read_json(path)
    mode = config.get("pooling_mode")
    if mode is None:
        flags = [name for name, value in config.items() if value is True and _FLAG in name]
        modes = [name.removeprefix(_FLAG) for name in flags]
        modes = [name.removesuffix("_token").removesuffix("_tokens") for name in modes]
    else:
        modes = mode if isinstance(mode, list) else [mode]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModelError(
            f"{path}: pooling mode {shown(modes)} is not supported; supported is one of "
            f"{', '.join(_MODES)}"
        )
    if config.get("include_prompt") is False:
        raise UnsupportedModelError(f"{path}: include_prompt=false is not supported")
    return _MODES[modes[0]]


def _read_dense(model_dir: Path, path: str) -> Dense:
    file = model_dir / path / "config.json"
    config = read_json(file)
    function = str(config.get("activation_function") or "Identity").rpartition(".")[2]
    if function not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{file}: activation_function={function:.80} is not supported; supported are "
            f"{', '.join(_ACTIVATIONS)}"
        )
    size, bias = _positive(config.get("out_features")), config.get("bias", True)
    if size is None or not isinstance(bias, bool):
        raise CheckpointError(f"{file}: out_features must be a positive integer, bias a bool")
    return Dense(path, size, bias, _ACTIVATIONS[function])


def _read_prompts(model_dir: Path, given: object) -> tuple[tuple[str, str], ...]:
    if given is None:
        return ()
    if not isinstance(given, dict) or not all(isinstance(one, str) for one in given.values()):
        raise CheckpointError(
            f"{model_dir}/config_sentence_transformers.json: prompts must be an object of texts"
        )
    return tuple(given.items())


def _read_list(path: Path) -> list[Any]:
    try:
        value = parse_json(read_bytes(path, most=_MAX_BYTES).decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, list):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a list of modules")
    return value


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _positive(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return None
    return value
