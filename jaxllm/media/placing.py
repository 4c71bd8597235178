"""Puts the tokens of images and videos into prompts, where a token stands for each."""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from jaxllm.errors import refused
from jaxllm.media.decode import Patches
from jaxllm.media.frames import Clip, VideoSpec
from jaxllm.media.item import ImageItem, ImageSpec
from jaxllm.plural import counted

DATA = "multi_modal_data"
_AN = {"image": "an image", "video": "a video"}
# The most positions that the videos of a prompt may take where positions tell the time: far from
# where float32 has no whole numbers any more, beside those of any text.
MAX_POSITIONS_IN_TIME = 1 << 23


class Encoder(Protocol):
    """A tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class Media(NamedTuple):
    """The images and videos of a prompt, decoded."""

    images: Sequence[Patches] = ()
    videos: Sequence[Clip] = ()


def place(
    token_ids: list[int], media: Media, spec: ImageSpec, encoder: Encoder | None
) -> tuple[list[int], list[ImageItem]]:
    """Put the tokens of images and videos in place of the tokens that stand for them; raise
    ValidationError."""
    image = spec.written[0] if spec.written else spec.image_token
    _check_marks("image", image, token_ids.count(spec.image_token_id), len(media.images))
    video = spec.video
    if video is not None:
        number = token_ids.count(video.token_id)
        _check_marks("video", video.token, number, len(media.videos))
    images, videos = iter(media.images), iter(media.videos)
    expanded: list[int] = []
    items: list[ImageItem] = []
    num_positions = 0
    left = iter(range(len(token_ids)))
    for index in left:
        token = token_ids[index]
        if token == spec.image_token_id:
            one = next(images)
            tokens = _tokens(one, spec)
            its = {"digest": _digest(one), "rows": one.rows, "columns": one.columns}
            start, end = len(expanded), len(expanded) + len(tokens)
            items.append(ImageItem(**its, start=start, end=end, pixels=one.pixels))
            expanded += tokens
        elif video is not None and token == video.token_id:
            is_between = index > 0 and token_ids[index - 1 : index + 2] == [
                video.start_id, token, video.end_id,
            ]  # fmt: skip
            if is_between and video.positions_per_second is None:
                # Each of the pairs has these tokens around it.
                expanded.pop()
                next(left)
            for tokens, item in _of_video(next(videos), len(expanded), spec, video, encoder):
                expanded += tokens
                items.append(item)
            num_positions += items[-1].time
            if num_positions > MAX_POSITIONS_IN_TIME:
                raise refused(
                    DATA,
                    counted(len(media.videos), "video"),
                    f"they last so long that they take more than {MAX_POSITIONS_IN_TIME} "
                    f"positions, {video.positions_per_second} a second; say a higher fps",
                )
        else:
            expanded.append(token)
    if expanded[-1] in spec.token_ids:
        # A step that computes a single token at the end of a prompt has no embeddings.
        last, mark, number = "image", spec.image_token, len(media.images)
        if video is not None and expanded[-1] == video.token_id:
            last, mark, number = "video", video.token, len(media.videos)
        raise refused(
            DATA,
            counted(number, last),
            f"the prompt ends with {mark!r}; write what the model has after {_AN[last]}, as its "
            "chat template does",
        )
    return expanded, items


def rewritten(
    text: object, ids: object, spec: ImageSpec, encoder: Encoder | None
) -> dict[str, Any]:
    """A text with what is put in place of the marks for images. The ids of the same text, which a
    chat has, too, change with it; others stay."""
    assert spec.written is not None, "marks stay as they are"
    mark, written = spec.written
    if not isinstance(text, str) or mark not in text:
        return {}
    changed: dict[str, Any] = {"prompt": text.replace(mark, written)}
    if not isinstance(ids, list) or encoder is None:
        return changed
    if mark == spec.image_token:  # and what is put around it are tokens, too
        of_image = encoder.encode(written, add_special_tokens=False)
        soft = [spec.image_token_id]
        of_text = [new for its in ids for new in (of_image if [its] == soft else [its])]
        changed["prompt_token_ids"] = of_text
    else:
        for adds in (False, True):  # a chat template may have written the special tokens
            if encoder.encode(text, add_special_tokens=adds) == ids:
                of_text = encoder.encode(changed["prompt"], add_special_tokens=adds)
                return changed | {"prompt_token_ids": of_text}
    return changed


def _check_marks(kind: str, mark: str, marks: int, number: int) -> None:
    if marks != number:
        raise refused(
            DATA,
            counted(number, kind),
            f"the prompt has {mark!r}, which stands for {_AN[kind]}, {counted(marks, 'time')}; "
            f"write it once for each {kind}, and nowhere else",
        )


def _of_video(
    clip: Clip, start: int, spec: ImageSpec, video: VideoSpec, encoder: Encoder | None
) -> Iterator[tuple[list[int], ImageItem]]:
    """The tokens of each pair of frames, which begin at this place of the prompt, and its item."""
    embedded = [video.token_id] * (clip.rows * clip.columns // spec.patches_per_token)
    positions: Sequence[int] = [0] * len(clip.pairs)
    if video.positions_per_second is not None:
        positions = video.positions(clip.times)
    for number, (pair, seconds) in enumerate(zip(clip.pairs, clip.times.seconds, strict=True)):
        before: list[int] = []
        tokens = embedded
        if video.positions_per_second is None:
            before = _words(seconds, encoder) + [video.start_id]
            tokens = [*before, *embedded, video.end_id]
        first = start + len(before)
        yield (
            tokens,
            ImageItem(
                digest=_digest(Patches(clip.rows, clip.columns, pair), b"frames"),
                start=first,
                end=first + len(embedded),
                rows=clip.rows,
                columns=clip.columns,
                pixels=pair,
                time=positions[number],
                continues=number > 0 and video.positions_per_second is not None,
            ),
        )
        start += len(tokens)


def _words(seconds: float, encoder: Encoder | None) -> list[int]:
    """The time of a pair of frames in words. They are tokens by themselves, whatever is before."""
    if encoder is None:
        raise refused(
            DATA,
            "a video",
            "there is no tokenizer (skip_tokenizer_init=True) for the times of its frames, which "
            "this model has in words",
        )
    return encoder.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False)


def _tokens(image: Patches, spec: ImageSpec) -> list[int]:
    """The tokens of an image: those of a row, a break, the next row, an end; or the rows alone."""
    rows, columns = image.rows // spec.merge, image.columns // spec.merge
    if spec.break_token_id is None or spec.end_token_id is None:
        return [spec.image_token_id] * rows * columns
    row = [spec.image_token_id] * columns + [spec.break_token_id]
    return (row * rows)[:-1] + [spec.end_token_id]


def _digest(image: Patches, kind: bytes = b"image") -> bytes:
    """The name of an image, or of a pair of frames, in caches. Fields have fixed lengths, and kinds
    do not begin each other, so that no two have the same bytes."""
    framed = kind + image.rows.to_bytes(8, "little") + image.columns.to_bytes(8, "little")
    return sha256(framed + image.pixels).digest()
