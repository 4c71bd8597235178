"""The reference: sorts every row. It defines the api's contract, in numpy with float64 sums."""

import numpy as np


def top_k_top_p_min_p_cut(
    p: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray
) -> np.ndarray:
    lowest = np.array(min_p, np.float32)
    for row, (k, share, ratio) in enumerate(zip(top_k, top_p, min_p, strict=True)):
        best_first = np.sort(p[row])[::-1]
        best_first = best_first[best_first >= ratio]
        if 0 < k < len(best_first):
            best_first = best_first[best_first >= best_first[k - 1]]
            lowest[row] = best_first[-1]
        if share < 1 and len(best_first):
            mass = np.cumsum(best_first, dtype=np.float64)
            lowest[row] = best_first[np.searchsorted(mass, share * mass[-1])]
    return lowest
