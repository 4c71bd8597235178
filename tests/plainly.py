"""How XLA compiles for a test: as it does for users, or plainly, where a test is of what engines do
with their programs and not of the numbers in them. tests/README.md says why that is sound."""

import functools
import importlib.metadata
import os
import sys

_OWN_FLAGS = os.environ.get("XLA_FLAGS", "")
# XLA's younger code generator for fusions on CPUs takes two thirds of the time of a compilation;
# the older one makes the same of them. From JAX 0.11 on there is no older one.
_OPTION = "xla_cpu_use_fusion_emitters"
_HAS_OLDER = importlib.metadata.version("jaxlib").startswith("0.10.")


def compile_plainly(plainly: bool) -> None:
    """Say how programs are compiled from now on, here and in processes that are started."""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(plainly)
    if _HAS_OLDER:
        if plainly:
            _add_the_option()
        flags = [_OWN_FLAGS] * bool(_OWN_FLAGS) + [f"--{_OPTION}=false"] * plainly
        os.environ["XLA_FLAGS"] = " ".join(flags)
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_disable_most_optimizations", plainly)


@functools.cache
def _add_the_option() -> None:
    """In this process the option follows jax_disable_most_optimizations."""
    import jax
    from jax._src import compiler

    get_compile_options = compiler.get_compile_options
    # XLA reads its flags once, now, and so without those that are for other processes.
    get_compile_options(num_replicas=1, num_partitions=1)

    @functools.wraps(get_compile_options)
    def with_the_option(*args, **kwargs):
        options = get_compile_options(*args, **kwargs)
        if jax.config.read("jax_disable_most_optimizations"):
            options.env_option_overrides = [*options.env_option_overrides, (_OPTION, False)]
        return options

    # JAX has no option of its own for options of all compilations.
    compiler.get_compile_options = with_the_option
