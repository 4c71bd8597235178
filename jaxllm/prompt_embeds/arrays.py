"""Reads the embeddings of prompts: arrays of Python, and files of NumPy or safetensors in base64.

Nothing of a file is run. Its header says its type and sizes, which are checked before anything is
made of them, so a file takes no more memory than its own bytes.
"""

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Protocol

import ml_dtypes
import msgspec
import numpy as np

from jaxllm.errors import ValidationError, refused
from jaxllm.prompt_embeds.item import EmbedsItem, EmbedsSpec
from jaxllm.prompts import TokensPrompt

KEY = "prompt_embeds"
# What stands for each embedding among the ids of tokens.
PLACEHOLDER = 0

_TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
_OF_NUMPY = {"<f2": "float16", "<f4": "float32", "<f8": "float64"}
_OF_SAFETENSORS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
_TYPES_IN_WORDS = "float16, bfloat16 and float32"
_FILES = "send the bytes of numpy.save or of safetensors, in base64"
_MOST_HEADER_BYTES = 1 << 16
_NUMPY, _ZIP, _PICKLE = b"\x93NUMPY", b"PK\x03\x04", b"\x80"
# The header as numpy.save writes it.
_HEADER = re.compile(
    rb"\{'descr': '([^']{1,16})', 'fortran_order': (True|False), 'shape': \(([0-9, ]{1,80})\), \}"
)


class Length(Protocol):
    """The rule for the length of a prompt."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def truncate(self) -> int | None: ...
    @property
    def most(self) -> int: ...


def has_embeds(prompt: object) -> bool:
    """Whether a prompt is one of embeddings."""
    return isinstance(prompt, Mapping) and prompt.get(KEY) is not None


def take_embeds(
    prompt: Any, spec: EmbedsSpec | None, length: Length, block_size: int
) -> tuple[Any, EmbedsItem | None]:
    """The prompt with ids of tokens in place of embeddings, and these; raise ValidationError."""
    if not has_embeds(prompt):
        if isinstance(prompt, Mapping) and KEY in prompt:
            prompt = {name: value for name, value in prompt.items() if name != KEY}
        return prompt, None
    if spec is None:
        raise refused(
            KEY,
            prompt[KEY],
            "the engine takes no embeddings; start it with enable_prompt_embeds=True",
        )
    others = {name for name, value in prompt.items() if value is not None}
    if others := others - {KEY, "cache_salt"}:
        name = min(map(str, others))
        raise refused(name, prompt.get(name), f"a prompt with {KEY} has nothing else of a prompt")
    if length.truncate is not None:
        raise refused(
            "truncate_prompt_tokens",
            length.truncate,
            f"a prompt with {KEY} is not cut; leave it out",
        )
    array = _checked(_read(prompt[KEY], spec, length.most), spec, length)
    data, row_bytes = array.tobytes(), array.dtype.itemsize * spec.hidden_size
    blocks = range(0, len(data), block_size * row_bytes)
    digests = [sha256(data[start : start + block_size * row_bytes]).digest() for start in blocks]
    tokens = TokensPrompt(prompt_token_ids=[PLACEHOLDER] * len(array))
    if prompt.get("cache_salt") is not None:
        tokens["cache_salt"] = prompt["cache_salt"]
    return tokens, EmbedsItem(data=data, digests=b"".join(digests))


def _read(given: Any, spec: EmbedsSpec, most: int) -> np.ndarray:
    if isinstance(given, str):
        most_bytes = most * spec.hidden_size * 8 + _MOST_HEADER_BYTES
        if len(given) > 4 * most_bytes // 3 + 4:
            raise refused(
                KEY,
                f"{len(given)} characters",
                f"they are more than {most} embeddings of {spec.hidden_size} numbers can take, "
                "and a prompt may have no more",
            )
        try:
            data = b64decode(given, validate=True)
        except (binascii.Error, ValueError):
            raise refused(KEY, given, f"it is not base64; {_FILES}") from None
        return _read_file(data)
    if not hasattr(type(given), "__array__"):
        raise refused(KEY, given, "it must be an array [tokens, hidden size], or a file in base64")
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # as other libraries have it
        kind = type(given).__name__
        why = "it cannot be made an array of NumPy; detach it, move it to the CPU, make it float32"
        raise refused(KEY, f"a {kind}", why) from None


def _read_file(data: bytes) -> np.ndarray:
    if data.startswith(_NUMPY):
        return _read_numpy(data)
    if data.startswith((_ZIP, _PICKLE)):
        why = f"files of torch.save hold code, and are not read; {_FILES}"
        raise refused(KEY, "a file of torch.save", why)
    return _read_safetensors(data)


def _read_numpy(data: bytes) -> np.ndarray:
    major = data[6] if len(data) > 6 else 0
    start = 10 if major == 1 else 12
    size = int.from_bytes(data[8:start], "little")
    found = _HEADER.match(data, start) if size <= _MOST_HEADER_BYTES else None
    if found is None or major not in (1, 2, 3) or found.end() > start + size:
        raise refused(KEY, "a file of NumPy", "its header is not as numpy.save writes it")
    name, order, sizes = (text.decode("ascii", "replace") for text in found.groups())
    if name not in _OF_NUMPY:
        why = f"it must have one of {_TYPES_IN_WORDS}"
        if name.endswith("V2"):
            why = "NumPy does not write down what this type is; send bfloat16 as safetensors"
        raise refused(KEY, f"an array of type {name}", why)
    shape = [int(size) for size in re.findall(r"[0-9]+", sizes)]
    return _shaped(data[start + size :], _OF_NUMPY[name], shape, "C" if order == "False" else "F")


def _read_safetensors(data: bytes) -> np.ndarray:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MOST_HEADER_BYTES, len(data) - 8):
        raise refused(KEY, f"{len(data)} bytes", f"they are of no known form; {_FILES}")
    try:
        header = msgspec.json.decode(data[8 : 8 + size], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = [msgspec.json.decode(one, type=_Tensor) for one in header.values()]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise refused(KEY, f"{len(data)} bytes", f"they are of no known form; {_FILES}") from None
    if len(tensors) != 1:
        why = "a file of safetensors must have one, which is the prompt"
        raise refused(KEY, f"{len(tensors)} tensors", why)
    (tensor,) = tensors
    if tensor.dtype not in _OF_SAFETENSORS:
        raise refused(
            KEY, f"a tensor of type {tensor.dtype}", f"it must have one of {_TYPES_IN_WORDS}"
        )
    data = data[8 + size :]
    if tensor.data_offsets != (0, len(data)):
        raise refused(KEY, "a file of safetensors", "its tensor is not all that follows its header")
    return _shaped(data, _OF_SAFETENSORS[tensor.dtype], tensor.shape, "C")


class _Tensor(msgspec.Struct):
    """What a header of safetensors says of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _shaped(data: bytes, name: str, shape: list[int], order: Any) -> np.ndarray:
    dtype, count = _TYPES[name], 1
    # Neither numpy nor an error's text copes with every number.
    if len(shape) > 3 or not all(0 <= size < 1 << 31 for size in shape):
        why = "it must be [tokens, hidden size]"
        raise refused(KEY, f"an array of shape {str(shape[:4])[:80]}", why)
    for size in shape:
        count *= size
    if len(data) != count * dtype.itemsize:
        why = f"it has {len(data)} bytes, where {name} needs {count * dtype.itemsize}"
        raise refused(KEY, f"an array of shape {shape}", why)
    return np.frombuffer(data, dtype).reshape(shape, order=order)


def _checked(array: np.ndarray, spec: EmbedsSpec, length: Length) -> np.ndarray:
    """The embeddings in the model's type, [tokens, hidden size]."""
    if array.dtype not in _TYPES.values():
        raise refused(
            KEY, f"an array of type {array.dtype}", f"it must have one of {_TYPES_IN_WORDS}"
        )
    shape = array.shape
    if len(shape) == 3 and shape[0] == 1:  # a batch of one
        array = array[0]
    if array.ndim != 2 or array.shape[1] != spec.hidden_size or not len(array):
        raise refused(
            KEY,
            f"an array of shape {list(shape)}",
            f"it must be [tokens, {spec.hidden_size}], with at least one token",
        )
    if len(array) > length.most:
        raise ValidationError(
            f"{KEY} has {len(array)} embeddings, but with max_model_len={length.max_model_len} a "
            f"prompt may have at most {length.most}, so that one token can be generated",
            parameter=KEY,
            value=len(array),
        )
    with np.errstate(over="ignore", invalid="ignore"):
        cast = np.ascontiguousarray(array, _TYPES[spec.dtype])
    if not np.isfinite(cast).all():
        raise refused(
            KEY,
            "an array with NaN or infinities",
            f"all numbers must be finite in the model's type, {spec.dtype}",
        )
    return cast
