"""The optimizer: gradients to directions, which the trainer scales by the learning rate."""

import jax
import optax


def make_optimizer(*, weight_decay: float, max_grad_norm: float) -> optax.GradientTransformation:
    """AdamW without its learning rate; only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        # A long memory of the gradients' sizes, since batches are small.
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(
            weight_decay, mask=lambda weights: jax.tree.map(lambda w: w.ndim > 1, weights)
        ),
    )
