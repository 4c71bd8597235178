"""Images of a request: read, decoded and placed in the tokens of its prompt.

`load` takes long and touches files and hosts, so servers call it before they tokenize, on threads
of its own. `placed` only counts.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any, Protocol

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError, refused
from jaxllm.media.chat import NamedImage
from jaxllm.media.decode import Patches, in_rgb, of_array, to_patches
from jaxllm.media.decode_process import DecodeProcess
from jaxllm.media.item import ImageItem, ImageSpec
from jaxllm.media.resizing import UndecodableError
from jaxllm.media.sources import read_file, read_url
from jaxllm.plural import counted
from jaxllm.sampling_params import MAX_STEP_LOGPROBS

DATA, UUIDS, KWARGS = "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"
# The keys of a prompt that say something of images.
KEYS = (DATA, UUIDS, KWARGS)


# How many requests are loaded at once: most of the time they wait for hosts.
_NUM_THREADS = 4


class Length(Protocol):
    """The rule for the length of a prompt."""

    @property
    def truncate(self) -> int | None: ...

    def fit(self, token_ids: list[int]) -> list[int]: ...


class Encoder(Protocol):
    """A tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class Loaded(tuple[Patches, ...]):
    """The images of a prompt, decoded."""


def has_images(prompt: object) -> bool:
    """Whether a prompt has a key for images."""
    return isinstance(prompt, Mapping) and any(prompt.get(key) is not None for key in KEYS)


class Images:
    """Loads and places the images of one engine's requests. Thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ImageSpec | None,
        encoder: Encoder | None,
        max_model_len: int,
    ):
        self._config = config.media
        self._max_tokens = max_model_len
        self._spec = spec
        self._encoder = encoder
        self._decoder = None if spec is None else DecodeProcess(spec)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "images")  # which begin when needed

    def load(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Return the prompt with its images decoded; raise ValidationError."""
        data = prompt.get(DATA)
        if data is not None and not isinstance(data, Mapping):
            raise refused(DATA, data, "it must be a dict, such as {'image': image}")
        if prompt.get(KWARGS):
            raise refused(KWARGS, prompt[KWARGS], "give it to the engine: it holds for all images")
        if unknown := (data or {}).keys() - {"image"}:
            raise refused(DATA, sorted(map(str, unknown)), "only 'image' is supported")
        given = (data or {}).get("image")
        if not isinstance(given, Loaded):
            images = list(given) if isinstance(given, list | tuple) else [given]
            images = [one for one in images if given is not None]
            self._check_number(len(images))
            _check_uuids(prompt.get(UUIDS), len(images))
            names = _names(images)
            given = self._decoded(names, images)
        others = {key: value for key, value in prompt.items() if key not in KEYS}
        return others | {DATA: {"image": given}} if given else others

    async def loaded(self, prompts: Sequence[Any]) -> list[Any]:
        """Load the images of several prompts, off the event loop."""
        loop = asyncio.get_running_loop()
        return [
            await loop.run_in_executor(self._threads, self.load, prompt)
            if has_images(prompt)
            else prompt
            for prompt in prompts
        ]

    def taken(self, prompt: Any) -> tuple[Any, Sequence[Patches]]:
        """The prompt without its images, and these."""
        if not has_images(prompt):
            return prompt, ()
        others = self.load(prompt)
        data = others.pop(DATA, None)
        if data is None:
            return others, ()
        if self._spec is not None and self._spec.written:
            others |= self._rewritten(others.get("prompt"), others.get("prompt_token_ids"))
        return others, data["image"]

    def placed(
        self, token_ids: list[int], images: Sequence[Patches], length: Length
    ) -> tuple[list[int], list[ImageItem]]:
        """Put the tokens of images in place of the token that stands for each; raise
        ValidationError if the prompt is too long then."""
        if not images:
            return token_ids, []
        if length.truncate is not None:
            raise refused(
                "truncate_prompt_tokens",
                length.truncate,
                "a prompt with images is not cut; leave it out",
            )
        token_ids, items = self._place(token_ids, images)
        return length.fit(token_ids), items

    def check_logprobs(self, items: Sequence[ImageItem], prompt_logprobs: int | None) -> None:
        """Refuse so many that a prompt would be computed token by token, if that cut an image."""
        if items and self._spec is not None and self._spec.sees_all:
            if prompt_logprobs is not None and prompt_logprobs > MAX_STEP_LOGPROBS:
                why = f"with images of this model at most {MAX_STEP_LOGPROBS}"
                raise refused("prompt_logprobs", prompt_logprobs, why)

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        if self._decoder is not None:
            self._decoder.close()

    def _place(
        self, token_ids: list[int], images: Sequence[Patches]
    ) -> tuple[list[int], list[ImageItem]]:
        spec = self._spec
        assert spec is not None, "images were loaded"
        expanded: list[int] = []
        items: list[ImageItem] = []
        marks = token_ids.count(spec.image_token_id)
        if marks != len(images):
            raise refused(
                DATA,
                counted(len(images), "image"),
                f"the prompt has {spec.written[0] if spec.written else spec.image_token!r}, which "
                "stands for an image, "
                f"{counted(marks, 'time')}; write it once for each image, and nowhere else",
            )
        left = iter(images)
        for token in token_ids:
            if token != spec.image_token_id:
                expanded.append(token)
                continue
            image = next(left)
            tokens = _tokens(image, spec)
            items.append(
                ImageItem(
                    digest=_digest(image),
                    start=len(expanded),
                    end=len(expanded) + len(tokens),
                    rows=image.rows,
                    columns=image.columns,
                    pixels=image.pixels,
                )
            )
            expanded += tokens
        if expanded[-1] == spec.image_token_id:
            # A step that computes a single token at the end of a prompt has no embeddings.
            raise refused(
                DATA,
                counted(len(images), "image"),
                f"the prompt ends with {spec.image_token!r}; write what the model has after an "
                "image, as its chat template does",
            )
        return expanded, items

    def _rewritten(self, text: object, ids: object) -> dict[str, Any]:
        """A text with what is put in place of the marks for images. The ids of the same text, which
        a chat has, too, change with it; others stay."""
        assert self._spec is not None and self._spec.written is not None
        mark, written = self._spec.written
        if not isinstance(text, str) or mark not in text:
            return {}
        changed: dict[str, Any] = {"prompt": text.replace(mark, written)}
        if not isinstance(ids, list) or self._encoder is None:
            return changed
        if mark == self._spec.image_token:  # and what is put around it are tokens, too
            of_image = self._encoder.encode(written, add_special_tokens=False)
            soft = [self._spec.image_token_id]
            of_text = [new for its in ids for new in (of_image if [its] == soft else [its])]
            changed["prompt_token_ids"] = of_text
        else:
            for adds in (False, True):  # a chat template may have written the special tokens
                if self._encoder.encode(text, add_special_tokens=adds) == ids:
                    of_text = self._encoder.encode(changed["prompt"], add_special_tokens=adds)
                    return changed | {"prompt_token_ids": of_text}
        return changed

    def _check_number(self, number: int) -> None:
        """Refuse more images than are allowed, before any is looked at."""
        if not number:
            return
        if self._spec is None:
            raise refused(
                DATA,
                counted(number, "image"),
                "this engine reads text alone: its model has no tower for images that is "
                "supported, or was started without",
            )
        if number > self._spec.max_images:
            raise refused(
                DATA,
                counted(number, "image"),
                f"a prompt may have {self._spec.max_images}; start the engine with a greater "
                "limit_mm_per_prompt",
            )

    def _decoded(self, names: Sequence[str], images: Sequence[Any]) -> Loaded:
        """Decode images while their tokens have room in a prompt: a small file may become large."""
        found, num_tokens = [], 0
        for name, image in zip(names, images, strict=True):
            patches = self._patches(name, image)
            assert self._spec is not None, "images are allowed"
            num_tokens += patches.rows * patches.columns // self._spec.patches_per_token
            if num_tokens >= self._max_tokens:
                raise refused(
                    DATA,
                    counted(len(images), "image"),
                    f"the first {len(found) + 1} of them have {num_tokens} tokens, and "
                    f"max_model_len={self._max_tokens}",
                )
            found.append(patches)
        return Loaded(found)

    def _patches(self, name: str, given: Any) -> Patches:
        spec, decoder = self._spec, self._decoder
        assert spec is not None and decoder is not None
        is_url = isinstance(given, NamedImage) and given.is_url
        if isinstance(given, NamedImage):
            given = given.given
        try:
            if is_url:
                return decoder.patches(read_url(given, self._config))
            if isinstance(given, str) and given.startswith(("data:", "http:", "https:", "file:")):
                return decoder.patches(read_url(given, self._config))
            if isinstance(given, str | os.PathLike):
                return decoder.patches(read_file(given))
            if isinstance(given, np.ndarray):
                return to_patches(in_rgb(of_array(name, given)), spec)
            if hasattr(given, "convert") and hasattr(given, "resize"):
                return to_patches(in_rgb(given), spec)
        except UndecodableError as error:
            raise ValidationError(f"{name}: {error}", parameter=name) from None
        raise refused(
            name, given, "it must be an image of Pillow, an array, the path of a file or a URL"
        )


def _names(images: Sequence[Any]) -> list[str]:
    """What errors call each image."""
    return [
        one.name if isinstance(one, NamedImage) else f"{DATA}.image[{place}]"
        for place, one in enumerate(images)
    ]


def _check_uuids(uuids: object, number: int) -> None:
    """Refuse malformed uuids. They change nothing: images are known by their content."""
    if uuids is None:
        return
    given = uuids.get("image") if isinstance(uuids, Mapping) else None
    given = [given] if isinstance(given, str) else given
    if isinstance(given, list | tuple) and len(given) == number:
        if all(isinstance(one, str | None) for one in given):
            return
    raise refused(UUIDS, uuids, "it must be {'image': [...]}, with a string or None for each")


def _tokens(image: Patches, spec: ImageSpec) -> list[int]:
    """The tokens of an image: those of a row, a break, the next row, an end; or the rows alone."""
    rows, columns = image.rows // spec.merge, image.columns // spec.merge
    if spec.break_token_id is None or spec.end_token_id is None:
        return [spec.image_token_id] * rows * columns
    row = [spec.image_token_id] * columns + [spec.break_token_id]
    return (row * rows)[:-1] + [spec.end_token_id]


def _digest(image: Patches) -> bytes:
    """The name of an image in caches. Fields have fixed lengths, so that no two images have the
    same bytes."""
    framed = b"image" + image.rows.to_bytes(8, "little") + image.columns.to_bytes(8, "little")
    return sha256(framed + image.pixels).digest()
