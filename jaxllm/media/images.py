"""Images and videos of a request: read, decoded and placed in the tokens of its prompt.

`load` takes long and touches files and hosts, so servers call it before they tokenize, on threads
of its own. `placed` only counts.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from msgspec import structs

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError, refused
from jaxllm.media.chat import NamedImage
from jaxllm.media.decode import Patches, in_rgb, of_array, to_patches
from jaxllm.media.decode_process import DecodeProcess
from jaxllm.media.frames import Clip, Room
from jaxllm.media.item import ImageItem, ImageSpec
from jaxllm.media.placing import DATA, Encoder, Media, place, rewritten
from jaxllm.media.resizing import UndecodableError
from jaxllm.media.sources import read_file, read_url
from jaxllm.media.videos import as_videos, read_video
from jaxllm.plural import counted
from jaxllm.sampling_params import MAX_STEP_LOGPROBS

UUIDS, KWARGS = "multi_modal_uuids", "mm_processor_kwargs"
# The keys of a prompt that say something of images and videos.
KEYS = (DATA, UUIDS, KWARGS)


# How many requests are loaded at once: most of the time they wait for hosts.
_NUM_THREADS = 4


class Length(Protocol):
    """The rule for the length of a prompt."""

    @property
    def truncate(self) -> int | None: ...

    def fit(self, token_ids: list[int]) -> list[int]: ...


class Loaded(tuple[Patches | Clip, ...]):
    """The images or the videos of a prompt, decoded."""


def has_images(prompt: object) -> bool:
    """Whether a prompt has a key for images and videos."""
    return isinstance(prompt, Mapping) and any(prompt.get(key) is not None for key in KEYS)


class Images:
    """Loads and places the images and videos of one engine's requests. Thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ImageSpec | None,
        encoder: Encoder | None,
        max_model_len: int,
    ):
        self._config = config.media
        self._max_model_len = max_model_len
        self._spec = spec
        self._encoder = encoder
        self._decoder = None if spec is None else DecodeProcess(structs.replace(spec, video=None))
        # Videos take long, and images do not wait for them. All of these begin when needed.
        self._videos = None if spec is None or spec.video is None else DecodeProcess(spec)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "images")
        self._video_threads = ThreadPoolExecutor(_NUM_THREADS, "videos")

    def load(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Return the prompt with its images decoded; raise ValidationError."""
        data = prompt.get(DATA)
        if data is not None and not isinstance(data, Mapping):
            raise refused(DATA, data, "it must be a dict, such as {'image': image}")
        if prompt.get(KWARGS):
            raise refused(
                KWARGS, prompt[KWARGS], "give it to the engine: it holds for all images and videos"
            )
        given = dict(data or {})
        if unknown := given.keys() - {"image", "video"}:
            why = "only 'image' and 'video' are supported"
            raise refused(DATA, sorted(map(str, unknown)), why)
        if not given or not all(isinstance(one, Loaded) for one in given.values()):
            given = self._decoded(given.get("image"), given.get("video"), prompt.get(UUIDS))
        others = {key: value for key, value in prompt.items() if key not in KEYS}
        return others | {DATA: given} if any(given.values()) else others

    async def loaded(self, prompts: Sequence[Any]) -> list[Any]:
        """Load the images and videos of several prompts, off the event loop."""
        loop = asyncio.get_running_loop()
        return [
            await loop.run_in_executor(self._threads_for(prompt), self.load, prompt)
            if has_images(prompt)
            else prompt
            for prompt in prompts
        ]

    def taken(self, prompt: Any) -> tuple[Any, Media]:
        """The prompt without its images and videos, and these."""
        if not has_images(prompt):
            return prompt, Media()
        others = self.load(prompt)
        data = others.pop(DATA, None)
        if data is None:
            return others, Media()
        spec = self._spec
        if spec is not None and spec.written:
            others |= rewritten(
                others.get("prompt"), others.get("prompt_token_ids"), spec, self._encoder
            )
        return others, Media(data.get("image", ()), data.get("video", ()))

    def placed(
        self, token_ids: list[int], media: Media, length: Length
    ) -> tuple[list[int], list[ImageItem]]:
        """Put the tokens of images and videos in place of the token that stands for each; raise
        ValidationError if the prompt is too long then."""
        if not any(media):
            return token_ids, []
        if length.truncate is not None:
            raise refused(
                "truncate_prompt_tokens",
                length.truncate,
                "a prompt with images or videos is not cut; leave it out",
            )
        assert self._spec is not None, "images were loaded"
        token_ids, items = place(token_ids, media, self._spec, self._encoder)
        return length.fit(token_ids), items

    def check_logprobs(self, items: Sequence[ImageItem], prompt_logprobs: int | None) -> None:
        """Refuse so many that a prompt would be computed token by token, if that cut an image."""
        if items and self._spec is not None and self._spec.sees_all:
            if prompt_logprobs is not None and prompt_logprobs > MAX_STEP_LOGPROBS:
                why = f"with images of this model at most {MAX_STEP_LOGPROBS}"
                raise refused("prompt_logprobs", prompt_logprobs, why)

    def close(self) -> None:
        for threads in (self._threads, self._video_threads):
            threads.shutdown(wait=False)
        for decoder in (self._decoder, self._videos):
            if decoder is not None:
                decoder.close()

    def _threads_for(self, prompt: Mapping[str, Any]) -> ThreadPoolExecutor:
        data = prompt.get(DATA)
        has_video = isinstance(data, Mapping) and data.get("video") is not None
        return self._video_threads if has_video else self._threads

    def _check_number(self, kind: str, number: int, most: int) -> None:
        """Refuse more than are allowed, before any is looked at."""
        if not number:
            return
        if self._spec is None:
            raise refused(
                DATA,
                counted(number, kind),
                "this engine reads text alone: its model has no tower for images that is "
                "supported, or was started without",
            )
        if kind == "video" and self._spec.video is None:
            raise refused(
                DATA,
                counted(number, kind),
                "this model takes no videos, or its engine was started without them "
                "(limit_mm_per_prompt); give frames as images",
            )
        if number > most:
            raise refused(
                DATA,
                counted(number, kind),
                f"a prompt may have {most}; start the engine with a greater limit_mm_per_prompt",
            )

    def _decoded(self, image: Any, video: Any, uuids: object) -> dict[str, Loaded]:
        """Decode images and videos while their tokens have room in a prompt: a small file may
        become large."""
        images = list(image) if isinstance(image, list | tuple) else [image]
        images = [one for one in images if image is not None]
        videos = as_videos(video)
        spec = self._spec
        of_videos = None if spec is None else spec.video
        self._check_number("image", len(images), 0 if spec is None else spec.max_images)
        self._check_number("video", len(videos), 0 if of_videos is None else of_videos.max_videos)
        _check_uuids(uuids, {"image": len(images), "video": len(videos)})
        found: dict[str, list[Patches | Clip]] = {"image": [], "video": []}
        num_tokens = 0
        for name, one in zip(_names("image", images), images, strict=True):
            assert spec is not None, "images are allowed"
            patches = self._patches(name, one)
            found["image"].append(patches)
            num_tokens += patches.rows * patches.columns // spec.patches_per_token
            if num_tokens >= self._max_model_len:
                raise refused(
                    DATA,
                    counted(len(images), "image"),
                    f"the first {len(found['image'])} of them have {num_tokens} tokens, and "
                    f"max_model_len={self._max_model_len}",
                )
        for name, one in zip(_names("video", videos), videos, strict=True):
            assert spec is not None and self._videos is not None, "videos are allowed"
            room = Room(self._max_model_len - num_tokens, self._max_model_len)
            clip = read_video(name, one, spec, self._videos, self._config, room)
            found["video"].append(clip)
            num_tokens += clip.num_patches // spec.patches_per_token
        return {kind: Loaded(its) for kind, its in found.items() if its}

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


def _names(kind: str, given: Sequence[Any]) -> list[str]:
    """What errors call each image or video."""
    return [
        one.name if isinstance(one, NamedImage) else f"{DATA}.{kind}[{place}]"
        for place, one in enumerate(given)
    ]


def _check_uuids(uuids: object, numbers: Mapping[str, int]) -> None:
    """Refuse malformed uuids. They change nothing: images are known by their content."""
    if uuids is None:
        return
    if not isinstance(uuids, Mapping) or not uuids or uuids.keys() - numbers.keys():
        raise refused(UUIDS, uuids, "it must be {'image': [...]}, with a string or None for each")
    for kind, given in uuids.items():
        its = [given] if isinstance(given, str) else given
        if not isinstance(its, list | tuple) or len(its) != numbers[kind]:
            its = [0]
        if not all(isinstance(one, str | None) for one in its):
            why = f"it must be {{{kind!r}: [...]}}, with a string or None for each"
            raise refused(UUIDS, uuids, why)
