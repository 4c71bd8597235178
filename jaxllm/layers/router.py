"""Chooses the experts of each token, and their weights in the token's sum."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import RMSNormSpec, Summing


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """The static part of a router.

    Scores of equal rank are taken by the number of their experts, the lowest first.
    """

    # Of the logits: a softmax over all experts, or over the chosen ones, or each one's sigmoid.
    scores: Literal["softmax", "softmax of chosen", "sigmoid"]
    # Whether the factors of a token are divided by their sum, which is at least `least_sum`.
    normalises: bool = False
    least_sum: float = 1e-20
    added_to_sum: float = 0.0
    scale: float = 1.0  # of the factors
    # Whether a stored bias is added to the scores for the choice, but not for the factors.
    has_selection_bias: bool = False
    # Experts are chosen among those of the best groups. The best scores of a group rank it.
    num_groups: int = 1
    chosen_groups: int = 1
    best_of_group: int = 2
    bias: bool = False
    # The norm of what the router sees, which is then divided by the root of its size.
    norm: RMSNormSpec | None = None
    # Whether the factor of each expert is multiplied by a stored number.
    scales_experts: bool = False
    # Whether weights and logits are float32, not of the model's dtype.
    in_float32: bool = False
    # Whether factors are rounded to the model's dtype.
    rounds_factors: bool = False


class Router(Linear):
    """Logits of all experts, and the choice of the best."""

    def __init__(
        self,
        spec: RouterSpec,
        hidden_size: int,
        num_experts: int,
        num_choices: int,
        *,
        dtype: DTypeLike,
    ):
        super().__init__(
            hidden_size,
            num_experts,
            bias=spec.bias,
            axes=(None, "hidden"),
            dtype=jnp.float32 if spec.in_float32 else dtype,
        )
        self.spec = spec
        self.num_choices = num_choices
        self.sums = Summing()
        self.input_norm = None if spec.norm is None else spec.norm.make(hidden_size, dtype=dtype)
        self.per_expert_scale = (
            nnx.Param(jnp.ones(num_experts, dtype), axes=(None,)) if spec.scales_experts else None
        )
        self.e_score_correction_bias = (
            nnx.Param(jnp.zeros(num_experts, jnp.float32), axes=(None,))
            if spec.has_selection_bias
            else None
        )

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the experts of each token, int32 [T, k], and their factors, float32 [T, k]."""
        spec = self.spec
        if self.input_norm is not None:
            x = self.input_norm(x) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        logits = self(x.astype(jnp.float32) if spec.in_float32 else x).astype(jnp.float32)
        scores = logits
        if spec.scores == "softmax":
            scores = self.sums.softmax(logits)
        elif spec.scores == "sigmoid":
            scores = jax.nn.sigmoid(logits)
        ranked = scores
        if self.e_score_correction_bias is not None:
            ranked = ranked + self.e_score_correction_bias[...]
        elif spec.scores == "sigmoid" and spec.num_groups == 1:
            ranked = logits  # in the same order; the sigmoids of large logits are all one
        _, chosen = jax.lax.top_k(self._of_best_groups(ranked), self.num_choices)
        factors = jnp.take_along_axis(scores, chosen, axis=-1)
        if spec.scores == "softmax of chosen":
            factors = self.sums.softmax(factors)
        if spec.normalises:
            total = self.sums.total(factors) + spec.added_to_sum
            factors = factors / jnp.maximum(total, spec.least_sum)
        if spec.scale != 1.0:
            factors = factors * spec.scale
        if self.per_expert_scale is not None:
            factors = factors * self.per_expert_scale[...].astype(jnp.float32)[chosen]
        if spec.rounds_factors:
            factors = factors.astype(x.dtype).astype(jnp.float32)
        return chosen, factors

    def _of_best_groups(self, ranked: jax.Array) -> jax.Array:
        """Make the scores of experts in other groups the lowest."""
        spec = self.spec
        if spec.chosen_groups == spec.num_groups:
            return ranked
        groups = ranked.reshape(len(ranked), spec.num_groups, -1)
        best, _ = jax.lax.top_k(groups, min(spec.best_of_group, groups.shape[-1]))
        _, kept = jax.lax.top_k(self.sums.total(best)[..., 0], spec.chosen_groups)
        is_kept = (kept[:, :, None] == jnp.arange(spec.num_groups)).any(axis=1)
        return jnp.where(is_kept[:, :, None], groups, -jnp.inf).reshape(ranked.shape)
