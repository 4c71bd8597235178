"""The reference: it defines the api's contract, in numpy and float64."""

import numpy as np


def total(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64).sum(-1)


def squares(x: np.ndarray) -> np.ndarray:
    return np.square(x.astype(np.float64)).sum(-1)
