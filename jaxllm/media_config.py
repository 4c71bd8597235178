"""The options of images, videos and embeddings in prompts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import refused
from jaxllm.option_types import option

# Of a prompt, where no option says otherwise.
_MOST_IMAGES = 64
_MOST_VIDEOS = 8


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Images, videos and embeddings in prompts"""

    limit_mm_per_prompt: Mapping[str, Any] | None = option(
        None,
        f'JSON object: {{"image": most images of a prompt, "video": most videos}} (default: '
        f"{_MOST_IMAGES} and {_MOST_VIDEOS}).",
    )
    language_model_only: bool = option(
        False, "Leave out the tower for images: prompts are text, and nothing is compiled for them."
    )
    mm_processor_kwargs: Mapping[str, Any] | None = option(
        None,
        'JSON object, such as {"size": {"longest_edge": 1024}}: how large images stay, and which '
        'frames of videos are seen: {"fps": 1} or {"num_frames": 16}.',
    )
    allowed_local_media_path: str | None = option(
        None, "Directory from which requests may name images and videos, as file:// URLs."
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "Hosts from which requests may name images and videos, as http(s) URLs; none unless given.",
    )
    enable_prompt_embeds: bool = option(
        False, "Take prompts of embeddings, in place of tokens: prompt_embeds."
    )

    def check(self) -> None:
        """Refuse values that are wrong for every model."""
        assert min(self.max_images, self.max_videos) >= 0
        path = self.allowed_local_media_path
        if path and not os.path.isdir(path):
            raise refused("allowed_local_media_path", path, "it is not a directory")
        for domain in self.allowed_media_domains:
            if not isinstance(domain, str) or not domain or set(domain) & set("/:@ \\*"):
                raise refused(
                    "allowed_media_domains",
                    domain,
                    "give the names of hosts alone, such as images.example.com",
                )

    @property
    def max_images(self) -> int:
        """The most images of a prompt."""
        return self._limits().get("image", _MOST_IMAGES)

    @property
    def max_videos(self) -> int:
        """The most videos of a prompt, for a model that has them. An engine without images has
        videos only if it says so."""
        return self._limits().get("video", _MOST_VIDEOS if self.max_images else 0)

    def wants(self, kind: str) -> bool:
        """Whether the user has asked for images, or for videos."""
        return self._limits().get(kind, 0) > 0

    def _limits(self) -> dict[str, int]:
        limits: dict[str, int] = {}
        for name, given in (self.limit_mm_per_prompt or {}).items():
            if name not in ("image", "video", "audio"):
                why = "it has limits of 'image' and 'video' alone"
                raise refused("limit_mm_per_prompt", name, why)
            count = given.get("count") if isinstance(given, Mapping) else given
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise refused(
                    "limit_mm_per_prompt",
                    given,
                    f"the limit of {name!r} must be a number from 0 on, or an object with 'count'",
                )
            if isinstance(given, Mapping) and set(given) != {"count"}:
                raise refused(
                    "limit_mm_per_prompt",
                    given,
                    "only 'count' is supported; mm_processor_kwargs says how large images stay",
                )
            if name == "audio" and count:
                raise refused("limit_mm_per_prompt", given, f"there is no {name} in prompts")
            limits[name] = count
        return limits
