"""Words errors for the client: with the request's own field names and the place of the mistake.

The engine has one name for a parameter and knows one prompt. A request has other names for some
fields and may have many prompts, and its body may be invalid JSON.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from jaxllm.errors import ValidationError, refused

_HALF_A_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def renamed(error: ValidationError, names: Mapping[str, str]) -> ValidationError:
    """Return the same error with other names for fields."""
    if type(error) is not ValidationError:
        return error  # the HTTP status depends on the type
    message, given = str(error), error.parameter or ""
    for old, new in names.items():
        message = re.sub(rf"(?<![\w.]){re.escape(old)}(?==)", lambda _, new=new: new, message)
    # The longest name that is the parameter, or that the parameter is a part of.
    old = max((one for one in names if _is_part(given, one)), key=len, default=None)
    if old is None:
        return _reworded(error, message, error.parameter)
    name = names[old] + given[len(old) :]
    if message.startswith(f"{given}: "):
        message = name + message[len(given) :]
    if name != given and not message.startswith((f"{name}=", f"{name}:")):
        message = f"{name}: {message}"
    return _reworded(error, message, name)


def _is_part(field: str, whole: str) -> bool:
    return field == whole or field.startswith((f"{whole}.", f"{whole}["))


def _reworded(error: ValidationError, message: str, name: str | None) -> ValidationError:
    return ValidationError(
        message, parameter=name, value=error.value, prompt_index=error.prompt_index
    )


def converted(body: dict[str, Any], kind: type[msgspec.Struct]) -> Any:
    """Make a struct of a decoded body; refuse a value of the wrong type by its place."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ValidationError):  # of a part that checks itself
            raise error.__cause__ from None
        raise _in_our_words(error, body) from None


def why_not_json(data: str | bytes, error: Exception) -> str:
    """Say why a text is not JSON, and at which byte."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if not raw.strip():
        return "it is empty"
    try:
        raw.decode()
    except UnicodeDecodeError as bad:
        return f"not UTF-8: {bad.reason} (byte {bad.start})"
    if "truncated" not in str(error):
        return str(error)
    half = _HALF_A_PAIR.search(raw)
    if half is not None:
        return f"half a surrogate pair, which is no text (byte {half.start()})"
    return f"it ends within a value (byte {len(raw)})"


def _in_our_words(error: msgspec.ValidationError, body: dict[str, Any]) -> ValidationError:
    """Reword msgspec's error, such as "Expected `int`, got `str` - at `$.stop[1]`"."""
    message, _, place = str(error).partition(" - at ")
    # msgspec does not name the key of a value in an object: "`$.logit_bias[...]`".
    steps = re.findall(r"\.(\w+)|\[(\d+)\]", place.partition("[...]")[0])
    if not steps:
        missing = re.search(r"required field `(\w+)`", message)
        return ValidationError(message, parameter=missing and missing[1])
    name, value = "", cast(Any, body)
    for key, index in steps:
        name += f"[{index}]" if index else f".{key}"
        value = value[int(index) if index else key]
    return refused(name[1:], value, message.replace("`", ""))
