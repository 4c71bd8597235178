"""What differs between the versions of JAX, and what JAX says about the place of a computation."""


def traced_tpu_name() -> str:
    """The chip, as `platform.CHIPS` has it, that the program being traced is for.

    That is the mesh's, also one of a compile-only topology; without one the default device's.
    """
    from jax.experimental.pallas import tpu as pltpu

    name = str(pltpu.get_tpu_info().chip_version)
    return {"7": "v7x", "7x": "v7x"}.get(name, name)
