"""The reference: sorts every row. It defines the api's contract, in numpy with float64 sums."""

import numpy as np


def top_k_top_p_min_p_mask(
    logits: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray
) -> np.ndarray:
    masked = np.array(logits)
    for row, k, share, ratio in zip(masked, top_k, top_p, min_p, strict=True):
        if row.max() == -np.inf:
            continue
        p = np.exp(row - row.max())
        best_first = np.sort(p)[::-1]
        best_first = best_first[best_first >= ratio]
        if 0 < k < len(best_first):
            best_first = best_first[best_first >= best_first[k - 1]]
        lowest = best_first[-1]
        if share < 1:
            mass = np.cumsum(best_first, dtype=np.float64)
            lowest = best_first[np.searchsorted(mass, share * mass[-1])]
        row[p < lowest] = -np.inf
    return masked
