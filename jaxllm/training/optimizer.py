"""The optimizer: gradients to directions, which the trainer scales by the learning rate.

Matrices inside the layers take Muon's directions: the gradient's moving average, made orthogonal.
With few steps, which is all that a processor can do, they reach a lower loss than Adam's.
Embeddings, norms and biases take Adam's. Both have the same size per weight, and so one rate.
"""

from collections.abc import Mapping

import jax
import optax

# Of Muon's directions, per weight: about that of Adam's.
_MUON_RMS = 0.2


def make_optimizer(*, weight_decay: float, max_grad_norm: float) -> optax.GradientTransformation:
    """Directions to go against; only matrices decay."""
    muon = optax.contrib.muon(1.0, consistent_rms=_MUON_RMS, ns_steps=4)
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.partition(
            {
                "muon": optax.chain(muon, optax.scale(-1.0)),
                "adam": optax.scale_by_adam(b1=0.9, b2=0.95),
            },
            _kinds,
        ),
        optax.add_decayed_weights(
            weight_decay, mask=lambda weights: {n: w.ndim > 1 for n, w in weights.items()}
        ),
    )


def _kinds(weights: Mapping[str, jax.Array]) -> dict[str, str]:
    return {
        name: "muon" if ".layers." in name and weight.ndim == 2 else "adam"
        for name, weight in weights.items()
    }
