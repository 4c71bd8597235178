"""What the towers of Qwen have in common: patches of two frames, and heads rotated in quarters."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxllm.errors import UnsupportedModelError, shown
from jaxllm.layers.rope import RopeConfig
from jaxllm.layers.self_attention import SelfAttentionSpec
from jaxllm.models.checkpoint_map import Place, Rule, Source, ViewedAs
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.tower import VideoTokens

CHANNELS = 3
FRAMES = 2  # of a video, in a patch
# For the tiny checkpoints in tests.
TINY_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 4,
    "temporal_patch_size": FRAMES,
    "merge_size": 2,
    "resample": 3,
    "size": {"shortest_edge": 256, "longest_edge": 4096},
}
TINY_IMAGE_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
# Their ids, as config.json has them.
TINY_IMAGE_IDS = {
    "image_token_id": 3,
    "vision_start_token_id": 4,
    "vision_end_token_id": 5,
    "video_token_id": 6,
}


def of_two_frames(pixels: jax.Array, patch_size: int) -> jax.Array:
    """Patches of two frames [P, C * F * p * p]. Those of images [P, C * p * p] become videos in
    which they stand still."""
    if pixels.shape[1] == CHANNELS * FRAMES * patch_size**2:
        return pixels
    of_channels = pixels.reshape(len(pixels), CHANNELS, 1, -1)
    frames = jnp.broadcast_to(of_channels, (*of_channels.shape[:2], FRAMES, of_channels.shape[3]))
    return frames.reshape(len(pixels), -1)


def patch_weights(patch_size: int) -> Rule:
    """The rule for the convolution over patches, which is a matrix."""
    name = "patch_embed.proj"

    def rule(place: Place) -> Source:
        (piece,) = place.pieces
        if place.leaf == "bias":
            return place.tensor(name, piece)
        shape = piece[0], CHANNELS, FRAMES, patch_size, patch_size
        return ViewedAs(place.plain_tensor(name, shape), piece)

    return rule


def read_video(
    config: HFConfig,
    ids: tuple[int, int, int],
    *,
    vocab_size: int,
    positions_per_second: int | None,
) -> VideoTokens:
    """Read the tokens of videos, whose usual `ids` are those of one, of its start and its end."""
    names = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
    token, start, end = (
        config.token_id(name, usual, vocab_size=vocab_size)
        for name, usual in zip(names, ids, strict=True)
    )
    return VideoTokens(token, start, end, positions_per_second)


def read_heads(vision: HFConfig, size: int) -> SelfAttentionSpec:
    """Read the attention of a tower."""
    num_heads = vision.integer("num_heads")
    head_size = size // num_heads
    if head_size % 4 or size % num_heads:
        raise UnsupportedModelError(
            f"config.json: heads of hidden_size={size} and num_heads={num_heads} in vision_config "
            "cannot be rotated by rows and columns"
        )
    return SelfAttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size,
        scale=head_size**-0.5,
        rope=RopeConfig(size=head_size, theta=read_rope_theta(vision)),
        qkv_bias=True,
        o_bias=True,
    )


def read_rope_theta(vision: HFConfig) -> float:
    """The base of the frequencies, which only newer configs have."""
    rope = vision.get("rope_parameters") or {}
    if isinstance(rope, Mapping) and rope.keys() <= {"rope_type", "rope_theta"}:
        theta = rope.get("rope_theta", 10_000.0)
        is_number = isinstance(theta, int | float) and not isinstance(theta, bool)
        if rope.get("rope_type", "axial") in ("axial", "default") and is_number and theta > 1:
            return float(theta)
    raise UnsupportedModelError(
        f"config.json: rope_parameters={shown(rope)} in vision_config are not supported"
    )
