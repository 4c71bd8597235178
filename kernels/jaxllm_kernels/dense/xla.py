"""Matrix products by XLA."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class XlaMatmul:
    """`api.Matmul` on every platform."""

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        # By default accelerators multiply float32 with fewer bits, but a float32 model needs all.
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jax.lax.dot_general(
            x,
            weight,
            (((x.ndim - 1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )


@dataclass(frozen=True)
class RoundedXlaMatmul:
    """`api.Matmul` for callers that round the product to x's dtype at once. XLA sees the product in
    that dtype.

    The sum is the same. If the product comes from a library (cuBLAS), this halves the bytes that go
    through memory, and XLA needs no kernel to round. If a sum goes over devices, each rounds its
    part. They exchange half the bytes, and XLA uses its faster all-reduce for a decode's few rows.
    """

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        if x.dtype == jnp.float32:
            return XlaMatmul()(x, weight)
        product = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
        return product.astype(jnp.float32)


@dataclass(frozen=True)
class XlaScaledMatmul:
    """`api.ScaledMatmul` on every platform. Accelerators widen codes while they multiply.

    Groups of inputs are multiplied one after the other, so that no copy of all weights is made.
    Inputs may be cut over `num_shards` devices, which then have whole groups: all devices take
    their first groups, then their second ones.
    """

    num_shards: int = 1

    def __call__(self, x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
        num_groups = scales.shape[1]
        if num_groups == 1:
            return XlaMatmul()(x, codes.astype(x.dtype)) * scales[:, 0]
        size = codes.shape[1] // num_groups
        assert size * num_groups == codes.shape[1], (codes.shape, scales.shape)
        if num_groups % self.num_shards or self.num_shards == 1:
            return self._sum(x, codes, scales, size)
        # An axis of shards, so that the inputs of all devices are cut alike.
        shards = self.num_shards
        x = x.reshape(*x.shape[:-1], shards, -1)
        codes, scales = (its.reshape(len(its), shards, -1) for its in (codes, scales))
        by_shard = jax.vmap(lambda x, codes, scales: self._sum(x, codes, scales, size), (-2, 1, 1))
        return by_shard(x, codes, scales).sum(0)

    def _sum(self, x: jax.Array, codes: jax.Array, scales: jax.Array, size: int) -> jax.Array:
        """Sum the products of groups of `size` inputs."""

        def add(group: jax.Array, sums: jax.Array) -> jax.Array:
            inputs = jax.lax.dynamic_slice_in_dim(x, group * size, size, axis=-1)
            its_codes = jax.lax.dynamic_slice_in_dim(codes, group * size, size, axis=-1)
            scale = jax.lax.dynamic_index_in_dim(scales, group, axis=-1, keepdims=False)
            return sums + XlaMatmul()(inputs, its_codes.astype(x.dtype)) * scale

        sums = jnp.zeros((*x.shape[:-1], len(codes)), jnp.float32)
        return jax.lax.fori_loop(0, scales.shape[1], add, sums)
