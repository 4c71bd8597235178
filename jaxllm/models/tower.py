"""The contract of a tower, which turns images into embeddings that stand for tokens of a prompt.

A tower computes the patches of many images at once. They lie one image after another in a flat
batch, and within an image in the order of the tokens that they become: the patches of one token are
neighbours, row by row.
"""

from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.layers.state import StateOps
from jaxllm.models.checkpoint_map import CheckpointMap

# What a token of an image sees: those before it, or all of its image, in all layers of the decoder
# or in those with a window alone.
Seeing = Literal["before", "image", "image_in_windows"]


class Images(NamedTuple):
    """The patches of many images."""

    # f32 [P, numbers of a patch], normalised: of each channel its rows, or in an engine that sees
    # videos those of both frames, which are alike in an image.
    pixels: jax.Array
    places: jax.Array  # i32 [P, 2]: the row and the column of each patch in its image
    # i32 [R + 1]: the patches of image r are [starts[r], starts[r + 1]). Images of padding are
    # empty. Patches of padding are in none, and what is computed of them must be finite.
    starts: jax.Array


class VideoTokens(NamedTuple):
    """How a model takes videos: pairs of frames, each of which the tower sees as it sees an image.
    A patch has that of both frames."""

    token_id: int  # for which an embedding stands
    start_id: int  # what stands before the embeddings of a pair, or of a whole video
    end_id: int
    # How many positions a second has, where positions tell the time of a pair; None: each pair has
    # its time before it, in words.
    positions_per_second: int | None


class Tower(Protocol):
    """A flax nnx module."""

    def __call__(self, images: Images, ops: StateOps, mesh: Mesh | None) -> jax.Array:
        """Return the outputs for each token one behind the other, [P / patches of a token, outputs
        * D]. Heads are cut over the mesh."""
        ...


class TowerSpec(Protocol):
    """What is static about a tower; hashable."""

    # The class in transformers that makes its images, as preprocessor_config.json has it.
    processor: ClassVar[str]

    @property
    def attention(self) -> SelfAttentionSpec:
        """The heads of its layers."""
        ...

    @property
    def patch_size(self) -> int:
        """The pixels of a patch's side."""
        ...

    @property
    def merge(self) -> int:
        """The patches of a token's side."""
        ...

    @property
    def image_token_id(self) -> int:
        """The token for which an embedding stands."""
        ...

    @property
    def marks(self) -> tuple[int, int] | None:
        """The tokens that stand before and behind an image in a text, where config.json names
        them."""
        ...

    @property
    def video(self) -> VideoTokens | None:
        """How it takes videos; None: not at all."""
        ...

    @property
    def seeing(self) -> Seeing: ...

    @property
    def image_size(self) -> int | None:
        """The pixels of the edges that every image has, or every tile of one; None: images keep
        theirs."""
        ...

    @property
    def num_outputs(self) -> int:
        """How many vectors it makes for a token: the embedding, then those that are added behind
        the first layers of the decoder."""
        ...

    def check(self, num_shards: int) -> None:
        """Raise ValidationError if the tower cannot be cut into so many equal shards."""
        ...

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> Any:
        """Make the `Tower`; `hidden_size` is the decoder's."""
        ...

    def names(self, names: CheckpointMap) -> CheckpointMap:
        """The map of the decoder together with this tower, which is its module `tower`."""
        ...
