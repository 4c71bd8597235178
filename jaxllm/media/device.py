"""The pool of embeddings of images, on the device, and the places of their tokens in a step."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.media.decode import places
from jaxllm.media.item import ImageSpec
from jaxllm.media.slice import NAME, NO_ROW, NUM_AXES
from jaxllm.models.base import Model
from jaxllm.plan.buckets import Bucket
from jaxllm.scheduler.schedule import Encoding, Slice

# The most images of one run of the tower.
_MAX_IMAGES = 32


class Images:
    """The feature's device half. The step takes the rows of its tokens, and how far their positions
    are from their places in the text. There is nothing to compute behind the model. Programs for
    decodes have it only if positions are not places."""

    name = NAME

    def __init__(self, spec: ImageSpec):
        self._has_grid_positions, self._sees_all = spec.has_grid_positions, spec.sees_all

    def fields(self, bucket: Bucket) -> dict[str, tuple[int, ...]]:
        offsets = {"offsets": (bucket.num_tokens,)} if self._has_grid_positions else {}
        if bucket.decode_only:
            return offsets
        if self._has_grid_positions:
            offsets = {"offsets": (NUM_AXES, bucket.num_tokens)}
        ahead = {"ahead": (bucket.num_tokens,)} if self._sees_all else {}
        return {"rows": (bucket.num_tokens,)} | ahead | offsets

    def pack(self, fields: Mapping[str, np.ndarray], its: Slice | None) -> None:
        if "rows" in fields:
            fields["rows"][...] = NO_ROW
        if its is None:
            return
        if "rows" in its:
            fields["rows"][: len(its["rows"])] = its["rows"]
        if "ahead" in its:
            fields["ahead"][: len(its["ahead"])] = its["ahead"]
        if "offsets" in its:
            offsets, room = its["offsets"], fields["offsets"]
            # The axes of a token of text are alike, and decodes are of text.
            room[..., : offsets.shape[1]] = offsets if room.ndim == 2 else offsets[0]

    def compute(
        self, fields: Mapping[str, jax.Array], model: Model, hidden: jax.Array
    ) -> dict[str, jax.Array]:
        return {}


class EncoderInputs(NamedTuple):
    """The images of one run of the tower, on the device."""

    pixels: jax.Array  # f32 [P, numbers of a patch], normalised
    places: jax.Array  # i32 [P, 2]
    starts: jax.Array  # i32 [images + 1]
    rows: jax.Array  # i32 [tokens]: where in the pool they go; padding is out of range


class EncoderLayout:
    """What travels to the device for a run of the tower over so many patches: their bytes, and one
    buffer of numbers."""

    def __init__(self, num_patches: int, spec: ImageSpec, num_rows: int):
        self.num_patches = num_patches
        self._spec = spec
        self._num_rows = num_rows
        sizes = (2 * num_patches, _MAX_IMAGES + 1, num_patches // spec.patches_per_token)
        ends = np.cumsum((0, *sizes))
        self._places, self._starts, self._rows = (
            slice(int(first), int(end)) for first, end in zip(ends[:-1], ends[1:], strict=True)
        )
        self._size = int(ends[-1])

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes of the numbers and of the bytes, for compiling."""
        bytes_shape = (self.num_patches, self._spec.patch_bytes)
        return (
            jax.ShapeDtypeStruct((self._size,), np.int32),
            jax.ShapeDtypeStruct(bytes_shape, np.uint8),
        )

    def pack(self, encodings: Sequence[Encoding]) -> tuple[np.ndarray, np.ndarray]:
        """Build both."""
        numbers = np.zeros(self._size, np.int32)
        pixels = np.zeros((self.num_patches, self._spec.patch_bytes), np.uint8)
        frames = pixels.reshape(self.num_patches, 3, self._spec.frames, -1)
        where, rows = numbers[self._places].reshape(-1, 2), numbers[self._rows]
        rows[...] = self._num_rows
        end = 0
        starts = [0]
        for one in encodings:
            start, end = end, end + one.rows * one.columns
            # Both frames are an image's.
            frames[start:end] = one.pixels.reshape(end - start, 3, -1, self._spec.patch_size**2)
            where[start:end] = places(one.rows, one.columns, self._spec.merge)
            merged = self._spec.patches_per_token
            rows[start // merged : end // merged] = one.pool_rows
            starts.append(end)
        numbers[self._starts] = starts + [end] * (_MAX_IMAGES + 1 - len(starts))
        return numbers, pixels

    def unpack(self, numbers: jax.Array, pixels: jax.Array) -> EncoderInputs:
        """Cut the buffer, and normalise the bytes; traced."""
        spec = self._spec
        of_channels = pixels.reshape(self.num_patches, 3, -1).astype(jnp.float32)
        mean, std = (jnp.array(values)[:, None] for values in (spec.mean, spec.std))
        normal = (of_channels * spec.scale - mean) / std
        return EncoderInputs(
            pixels=normal.reshape(self.num_patches, -1),
            places=numbers[self._places].reshape(-1, 2),
            starts=numbers[self._starts],
            rows=numbers[self._rows],
        )


def encoder_sizes(spec: ImageSpec, max_patches: int) -> tuple[int, ...]:
    """How many patches the programs of the tower compute: powers of two, up to one that holds the
    largest image, which has so many."""
    first = max(256, spec.patches_per_unit)
    powers = [1 << power for power in range(first.bit_length() - 1, 1 << 5)]
    up_to = next(size for size in powers if size >= max_patches)
    return tuple(
        math.ceil(size / spec.patches_per_unit) * spec.patches_per_unit
        for size in powers
        if size <= up_to
    )


def in_runs(encodings: Iterable[Encoding], sizes: Sequence[int]) -> Iterator[list[Encoding]]:
    """Divide images among runs of the tower, in their order."""
    run: list[Encoding] = []
    num_patches = 0
    for one in encodings:
        its = one.rows * one.columns
        if run and (num_patches + its > sizes[-1] or len(run) == _MAX_IMAGES):
            yield run
            run, num_patches = [], 0
        run.append(one)
        num_patches += its
    if run:
        yield run


def most_patches(sizes: Sequence[int], *, max_patches: int, max_images: int) -> int:
    """The most patches, with padding, of the programs of all runs before a step. Its images have
    so many patches, since the pool holds all of them, and each has a token in the step."""
    # A run and the first image of the next one have more patches than the largest program, or the
    # run has as many images as it may; or it is the last.
    num_runs = 2 * max_patches // sizes[-1] + max_images // _MAX_IMAGES + 1
    # A program has less than twice the patches of its run, rounded up, or is the smallest.
    return 2 * max_patches + num_runs * sizes[0]
