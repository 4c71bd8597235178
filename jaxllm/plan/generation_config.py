"""Reads generation_config.json: the tokens that end an answer, and default sampling parameters.

Only this module reads the file. The plan needs both at start. So a damaged file is refused before
anything is loaded, and cannot fail a request later.
"""

from pathlib import Path
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ValidationError, shown
from jaxllm.files import read_json
from jaxllm.sampling_params import SamplingParams

# Field of generation_config.json -> field of SamplingParams.
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_eos_token_ids(
    model_dir: Path, *, of_config: tuple[int, ...], vocab_size: int
) -> tuple[int, ...]:
    """The ids of config.json, and those that generation_config.json adds (ends of turns)."""
    value = _read(model_dir).get("eos_token_id")
    added = value if isinstance(value, list) else [] if value is None else [value]
    for file, ids in (("config.json", of_config), ("generation_config.json", added)):
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                problem = "it must be a token id or a list of them"
            elif not 0 <= token < vocab_size:
                problem = f"ids of this model are at least 0 and below {vocab_size}"
            else:
                continue
            raise CheckpointError(
                f"{model_dir / file}: eos_token_id {shown(token)}: {problem}; correct the file"
            )
    return tuple(dict.fromkeys([*of_config, *added]))


def read_default_sampling_params(config: ModelConfig, model_dir: Path) -> SamplingParams:
    """The model's recommended defaults, as `config.generation_config` selects them."""
    if config.generation_config == "vllm":
        return SamplingParams()
    is_own = config.generation_config == "auto"
    source = _source(config, model_dir)
    given = _read(source)
    values = {ours: given[name] for name, ours in _FIELDS.items() if given.get(name) is not None}
    if not is_own and not values:
        raise ValidationError(
            f"generation_config={str(source)!r} has no generation_config.json with sampling "
            "parameters; give a directory that has one, 'auto' or 'vllm'",
            parameter="generation_config",
            value=config.generation_config,
        )
    try:
        return SamplingParams(**values)
    except ValidationError as error:
        raise ValidationError(
            f"generation_config.json in {source}: {error}; "
            "correct it, or start with generation_config='vllm'",
            parameter="generation_config",
            value=config.generation_config,
        ) from error


def read_max_new_tokens(config: ModelConfig, model_dir: Path) -> int | None:
    """The longest answer that the model recommends, if any. The default parameters have it as
    `max_tokens`, too, but they have a `max_tokens` in any case."""
    if config.generation_config == "vllm":
        return None
    return _read(_source(config, model_dir)).get("max_new_tokens")


def _source(config: ModelConfig, model_dir: Path) -> Path:
    is_own = config.generation_config == "auto"
    return model_dir if is_own else Path(config.generation_config).expanduser()


def _read(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    return read_json(path) if path.exists() else {}
