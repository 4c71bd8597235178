"""The optimizer: turns gradients into directions. The trainer multiplies by the learning rate."""

from typing import Any

import jax
import optax

TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def make_optimizer(
    *, weight_decay: float, max_grad_norm: float, table_rate: float
) -> optax.GradientTransformation:
    """AdamW without its learning rate; only matrices decay.

    Embedding and head have `table_rate` times the learning rate. They are fitted before the first
    step, and Adam would move the rows of rare tokens as far as others because of a few examples.
    """
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        # b2 averages the gradients' sizes over many steps, because batches are small.
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(
            weight_decay, mask=lambda weights: jax.tree.map(lambda w: w.ndim > 1, weights)
        ),
        optax.stateless(lambda directions, _: _scaled(directions, table_rate)),
    )


def _scaled(directions: Any, rate: float) -> dict[str, jax.Array]:
    return {name: d * (rate if name in TABLES else 1.0) for name, d in directions.items()}
