"""An image on its way to the engine, and what must be known of a model to make one."""

import msgspec

from jaxllm.media.frames import FRAMES, VideoSpec
from jaxllm.media.resizing import Area, LongestEdge, Square, Tiles, TokenBudget


class ImageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's images become pixels, patches and tokens. Sizes are in pixels."""

    patch_size: int
    merge: int  # the patches of a token's side
    resizing: LongestEdge | Area | Square | Tiles | TokenBudget
    resample: int  # the filter for that, as Pillow counts them
    # What the device makes of the bytes of each channel: (byte * scale - mean) / std.
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_token: str  # stands for an image in the text of a prompt
    image_token_id: int
    # After each row of an image but the last, and after that; None: an image is its embeddings.
    break_token_id: int | None = None
    end_token_id: int | None = None
    # Whether the tokens of an image have positions in its rows and columns ("mrope"), so that the
    # positions behind it are not numbers of tokens.
    has_grid_positions: bool = False
    # Whether the tokens of an image see each other, so that no step ends inside of one.
    sees_all: bool = False
    only_in_windows: bool = False  # in layers with a window, and not in the others
    # What stands for an image in a text, and what is put there, with `image_token` once; None: that
    # token stands there itself.
    written: tuple[str, str] | None = None
    max_images: int  # of a prompt
    video: VideoSpec | None = None  # None: there are no videos in prompts

    @property
    def side(self) -> int:
        """The pixels of a token's side."""
        return self.patch_size * self.merge

    @property
    def max_patches(self) -> int:
        """The patches of the largest image, or of the largest pair of frames."""
        most = self.resizing.max_tokens(self.side)
        if self.video is not None:
            most = max(most, self.video.resizing.max_tokens(self.side))
        return most * self.patches_per_token

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens for which embeddings stand."""
        if self.video is None:
            return (self.image_token_id,)
        return (self.image_token_id, self.video.token_id)

    @property
    def patches_per_token(self) -> int:
        return self.merge**2

    @property
    def patches_per_unit(self) -> int:
        """Every image has a multiple of so many patches: those of a token, or of a tile."""
        if isinstance(self.resizing, Tiles):
            return (self.resizing.pixels // self.patch_size) ** 2
        return self.patches_per_token

    @property
    def frames(self) -> int:
        """Of so many frames the device gets patches."""
        return 1 if self.video is None else FRAMES

    @property
    def patch_bytes(self) -> int:
        return 3 * self.frames * self.patch_size**2


class ImageItem(msgspec.Struct, frozen=True, kw_only=True):
    """An image at its place in a prompt, or a pair of frames of a video."""

    digest: bytes  # of all that its embeddings depend on
    start: int  # the place of its first token in the prompt
    end: int  # the place behind its last token
    rows: int  # of patches
    columns: int
    # uint8: the patches one after another, those of a token beside each other. A patch has the rows
    # of its first channel, then those of the next. Tiles lie one below the other. Of a pair of
    # frames, each channel has the rows of the first frame, then those of the second.
    pixels: bytes
    # Where positions tell the time: how many of them a pair of frames is behind the first pair of
    # its video, and whether it has that video's position, not that of the text before it.
    time: int = 0
    continues: bool = False

    @property
    def num_patches(self) -> int:
        return self.rows * self.columns
