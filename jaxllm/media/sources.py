"""Where the bytes of an image or a video are: in a data URL, behind a URL, in a file."""

import base64
import binascii
import os
import re
import urllib.parse
from pathlib import Path

from jaxllm.errors import JaxLLMError
from jaxllm.files import open_regular
from jaxllm.media.fetch import MAX_BYTES, fetch, too_long
from jaxllm.media.resizing import UndecodableError
from jaxllm.media_config import MediaConfig

_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(;[\w.+-]+=[^;,]*)*;base64,", re.ASCII)


def read_url(url: str, config: MediaConfig, most: int = MAX_BYTES) -> bytes:
    """Return the bytes that a request's URL names; raise UndecodableError."""
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return _of_data_url(url, most)
    if scheme == "file":
        return read_file(_allowed_path(url, config), most)
    return fetch(url, config.allowed_media_domains, most=most)


def read_file(path: str | os.PathLike[str], most: int = MAX_BYTES) -> bytes:
    """Return the bytes of a file; raise UndecodableError."""
    try:
        with open_regular(Path(path)) as file:
            data = file.read(most + 1)
    except (OSError, ValueError, JaxLLMError):
        raise UndecodableError("there is no such file that can be read") from None
    if len(data) > most:
        raise UndecodableError(too_long(most))
    return data


def _of_data_url(url: str, most: int) -> bytes:
    match = _DATA.match(url[:1024])
    if match is None:
        raise UndecodableError("it is not of the form data:type;base64,...")
    start = match.end()
    if (len(url) - start) // 4 * 3 > most:
        raise UndecodableError(too_long(most))
    try:
        return base64.b64decode(url[start:], validate=True)
    except (binascii.Error, ValueError):
        raise UndecodableError("what follows ';base64,' is not base64") from None


def _allowed_path(url: str, config: MediaConfig) -> Path:
    """The path of a file:// URL, which must lead inside the allowed directory, links followed."""
    root = config.allowed_local_media_path
    if not root:
        raise UndecodableError(
            "files are not allowed; the operator allows a directory by --allowed-local-media-path"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        path = Path(os.path.realpath(urllib.parse.unquote(parts.path, errors="strict")))
    except (ValueError, OSError):
        raise UndecodableError("it is not a URL of a file") from None
    if parts.netloc not in ("", "localhost") or not path.is_relative_to(os.path.realpath(root)):
        raise UndecodableError("it is not in the directory that the operator allows")
    return path
