"""The loss: the surprise at the text, and the distance from a teacher."""

import jax
import jax.numpy as jnp


def surprise(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood in nats of each target: [..., V] and [...] to [...]; 0 for padding,
    whose target is negative."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    found = jnp.take_along_axis(log_probs, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(targets >= 0, -found, 0.0)


def distance(logits: jax.Array, teacher_logits: jax.Array, temperature: float) -> jax.Array:
    """KL(teacher || student) at a temperature: [..., V] twice to [...].

    The factor of the squared temperature makes its gradient as large as that of `surprise`.
    """
    teacher = jax.nn.log_softmax(teacher_logits / temperature, axis=-1)
    student = jax.nn.log_softmax(logits / temperature, axis=-1)
    return temperature**2 * jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)
