"""The reference: it defines the api's contract, in numpy."""

import numpy as np

from jaxllm_kernels.add_norm.api import RMSNormConfig


def add_norm(
    stream: np.ndarray, output: np.ndarray, weight: np.ndarray | None, config: RMSNormConfig
) -> tuple[np.ndarray, np.ndarray]:
    dtype = stream.dtype
    total = (stream.astype(np.float32) + output.astype(np.float32)).astype(dtype)
    wide = total.astype(np.float32)
    mean_square = np.mean(np.square(wide), axis=-1, keepdims=True)
    normal = wide / np.sqrt(mean_square + np.float32(config.eps))
    if weight is None:
        return total, normal.astype(dtype)
    if config.rounds_first:
        normal = normal.astype(dtype).astype(np.float32)
    return total, (normal * (weight.astype(np.float32) + np.float32(config.offset))).astype(dtype)
