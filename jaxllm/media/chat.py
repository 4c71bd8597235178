"""The images and videos in the messages of a chat, and the messages without them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxllm.errors import refused

# Types of parts, and the field of each that has the image.
_FIELDS = {"image_url": "image_url", "input_image": "image_url", "image_pil": "image_pil"}
_VIDEO_URL = "video_url"
# What stands for an image, and for a video, in messages for a template.
IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
_DETAILS = (None, "auto", "low", "high", "original")


class NamedImage(NamedTuple):
    """An image, or a video, as a request gives it: a URL, or what Python has."""

    name: str  # its place in the request
    given: Any
    is_url: bool


class Seen(NamedTuple):
    """Messages with a mark for each image and video, and these in their order."""

    messages: Sequence[Any]
    images: list[NamedImage]
    videos: list[NamedImage]

    @property
    def data(self) -> dict[str, list[NamedImage]]:
        """As in `multi_modal_data`."""
        both = {"image": self.images, "video": self.videos}
        return {kind: its for kind, its in both.items() if its}


def has_images(messages: object) -> bool:
    """Whether a message of a conversation has an image."""
    return _has(messages, (*_FIELDS, "image"))


def has_media(messages: object) -> bool:
    """Whether a message of a conversation has an image or a video."""
    return _has(messages, (*_FIELDS, "image", _VIDEO_URL, "video"))


def _has(messages: object, kinds: Sequence[str]) -> bool:
    return isinstance(messages, list | tuple) and any(
        isinstance(part, Mapping) and part.get("type") in kinds
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def take_images(messages: Sequence[Any]) -> Seen:
    """Take the images and videos out of messages; raise ValidationError. What is malformed
    otherwise is left to those who read the text."""
    images: list[NamedImage] = []
    videos: list[NamedImage] = []
    if not has_media(messages):
        return Seen(messages, images, videos)
    taken: list[Any] = []
    for place, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            taken.append(message)
            continue
        parts = []
        for number, part in enumerate(content):
            name, kind = f"messages[{place}].content[{number}]", _kind(part)
            if kind in _FIELDS:
                images.append(_image(part, name))
                parts.append(IMAGE)
            elif kind == _VIDEO_URL:
                videos.append(_video(part, name))
                parts.append(VIDEO)
            elif kind == "image":
                why = "give the image, in a part of type 'image_url' or 'image_pil'"
                raise refused(name, part, why)
            elif kind == "video":
                raise refused(name, part, "give the video, in a part of type 'video_url'")
            else:
                parts.append(part)
        taken.append({**message, "content": parts})
    return Seen(taken, images, videos)


def _kind(part: object) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _video(part: Mapping[str, Any], name: str) -> NamedImage:
    if unknown := part.keys() - {"type", _VIDEO_URL, "uuid"}:
        raise refused(name, sorted(map(str, unknown)), "a video has no such fields")
    if part.get("uuid") is not None and not isinstance(part["uuid"], str):
        raise refused(f"{name}.uuid", part["uuid"], "it must be a string")
    given, name = part.get(_VIDEO_URL), f"{name}.{_VIDEO_URL}"
    if isinstance(given, Mapping):
        if unknown := given.keys() - {"url"}:
            raise refused(name, sorted(map(str, unknown)), "only 'url' is known")
        given, name = given.get("url"), f"{name}.url"
    if not isinstance(given, str):
        why = "it must be a URL; a video is given with every request, whatever its uuid"
        raise refused(name, given, why)
    return NamedImage(name, given, is_url=True)


def _image(part: Mapping[str, Any], name: str) -> NamedImage:
    kind = str(part["type"])
    field = _FIELDS[kind]
    if unknown := part.keys() - {"type", field, "uuid", "detail"}:
        raise refused(name, sorted(map(str, unknown)), "an image has no such fields")
    uuid = part.get("uuid")
    if uuid is not None and not isinstance(uuid, str):
        raise refused(f"{name}.uuid", uuid, "it must be a string")
    given, detail, name = part.get(field), part.get("detail"), f"{name}.{field}"
    if field == "image_pil":
        if not hasattr(type(given), "__array_interface__"):
            # A body of JSON has none of these, and must not name files by this part.
            raise refused(name, given, "it must be an image of Pillow, or an array")
        return NamedImage(name, given, is_url=False)
    if isinstance(given, Mapping):
        if unknown := given.keys() - {"url", "detail"}:
            raise refused(name, sorted(map(str, unknown)), "only 'url' and 'detail' are known")
        given, detail, name = given.get("url"), given.get("detail", detail), f"{name}.url"
    if detail not in _DETAILS:
        raise refused(f"{name}.detail", detail, "it may be 'auto', 'low' or 'high'")
    if not isinstance(given, str):
        why = "it must be a URL; an image is given with every request, whatever its uuid"
        raise refused(name, given, why)
    return NamedImage(name, given, is_url=True)
