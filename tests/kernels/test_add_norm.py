import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.add_norm import reference
from jaxllm_kernels.add_norm.api import RMSNormConfig
from jaxllm_kernels.add_norm.gpu import GpuAddNorm
from jaxllm_kernels.compat import why_no_mosaic_gpu

no_mosaic = why_no_mosaic_gpu()
interpreted = pytest.mark.skipif(bool(no_mosaic), reason=f"JAX for Mosaic GPU kernels {no_mosaic}")

BACKENDS = [
    pytest.param(GpuAddNorm(interpret=True), marks=interpreted, id="interpreted"),
    pytest.param(GpuAddNorm(), marks=pytest.mark.gpu, id="gpu"),
]


@pytest.mark.parametrize("add_norm", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("size", "has_weight", "config"),
    [
        (512, True, RMSNormConfig(eps=1e-5)),
        (1024, True, RMSNormConfig(eps=1e-2, offset=1.0, rounds_first=False)),
        (512, False, RMSNormConfig(eps=1e-5)),
    ],
)
def test_equals_the_reference(add_norm, dtype, size, has_weight, config, request, capfd):
    if not add_norm.interpret:
        request.getfixturevalue("gpu")
    rng = np.random.default_rng(0)
    stream, output, weight = (
        rng.normal(size=shape).astype(dtype) for shape in ((3, size), (3, size), (size,))
    )
    weight = weight if has_weight else None
    assert add_norm.supports(size, dtype)
    total, normal = add_norm(
        jnp.asarray(stream), jnp.asarray(output), None if weight is None else jnp.asarray(weight),
        config,
    )  # fmt: skip
    expected_total, expected = reference.add_norm(stream, output, weight, config)
    np.testing.assert_array_equal(np.asarray(total), expected_total)
    # The sum of squares may be rounded otherwise, which may round a number to its neighbour.
    np.testing.assert_allclose(
        np.asarray(normal).astype(np.float32), expected.astype(np.float32), rtol=2**-6
    )
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("size", "dtype"), [(500, "bfloat16"), (512, "float32"), (16384, "bfloat16")]
)
def test_other_rows_are_left_to_xla(size, dtype):
    assert not GpuAddNorm().supports(size, dtype)
