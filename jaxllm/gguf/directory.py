"""The model directory of GGUF files: what config.json and the tokenizer's files would say, written
into the user's cache, beside links to the files.

So all that reads a model directory reads these models, and a server's processes find the same one.
It is written once for each state of the files.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.gguf.model import SUFFIX, GGUFModel, open_model, parts_of
from jaxllm.gguf.tokenizer import make_tokenizer

CACHE = "~/.cache/jaxllm/gguf"
METHOD = "gguf"  # of quantization_config
# Modules whose weights are values here, whatever the file has: rows of tables, and routers.
_VALUES = ("model.embed_tokens", ".mlp.gate", ".block_sparse_moe.gate")


def model_directory(path: Path) -> Path:
    """The directory of the model that a file has, or has a part of; write it if it is new."""
    files = [file.resolve() for file in parts_of(path)]
    root = Path(CACHE).expanduser()
    directory = root / _key(files)
    if (directory / "config.json").exists():
        return directory
    model = open_model(path)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / "model"
            made.mkdir(mode=0o700)
            _write(model, files, made)
            _place(made, directory)
    except OSError as error:
        raise CheckpointError(
            f"{path}: the model's config and tokenizer cannot be written to {root}: "
            f"{error.strerror or error}"
        ) from error
    return directory


def only_file(directory: Path) -> Path | None:
    """The first file of the model of a directory that has GGUF files of one model and no other
    weights; None: it has none. Refuses several models."""
    names = sorted(file.name for file in directory.iterdir() if file.is_file())
    found = [directory / name for name in names if name.endswith(SUFFIX)]
    if not found or any(name.endswith(".safetensors") for name in names):
        return None
    models = {parts_of(file) for file in found}
    if len(models) > 1:
        raise CheckpointError(
            f"{directory} has several models, of which one must be given: "
            f"{', '.join(sorted(parts[0].name for parts in models)[:5])}"
        )
    return found[0]


def linked_files(directory: Path) -> list[Path]:
    """The files of a model directory that was written here; empty: it was not."""
    return sorted(directory.glob(f"*{SUFFIX}"))


def _key(files: list[Path]) -> str:
    """What determines the directory: the files, and what writes it."""
    facts: list[Any] = [
        hashlib.sha256(source.read_bytes()).hexdigest()
        for source in sorted(Path(__file__).parent.glob("*.py"))
    ]
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
        facts += [str(file), status.st_size, status.st_mtime_ns]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _write(model: GGUFModel, files: list[Path], directory: Path) -> None:
    config = model.described().config
    tokenizer = make_tokenizer(model.metadata, config["vocab_size"])
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_ids or None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    types: dict[str, list[str]] = {}
    for name, stored in model.stored().items():
        module = name.removesuffix(".weight")
        if stored.is_coded and not module.endswith(_VALUES):
            types.setdefault(stored.place.type_name, []).append(module)
    if types:
        config = config | {"quantization_config": {"quant_method": METHOD, "types": types}}
    contents = {
        "config.json": config | ids,
        "generation_config.json": ids,
        "tokenizer.json": tokenizer.tokenizer,
        "tokenizer_config.json": tokenizer.config | {"made_of": METHOD},
    }
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    for file in files:
        (directory / file.name).symlink_to(file)


def _place(made: Path, directory: Path) -> None:
    """Move a finished directory to its place; another process may have been faster."""
    try:
        os.rename(made, directory)
    except OSError:
        if not (directory / "config.json").exists():
            raise
