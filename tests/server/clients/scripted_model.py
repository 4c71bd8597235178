"""A logits processor that makes a model generate the token ids that the request contains."""

from jaxllm.sampling.logits_processor import LogitsProcessor

LONGEST = 160


class Scripted(LogitsProcessor):
    """Forces the tokens of `vllm_xargs={"script": [...]}`, and then the end of sequence, 0."""

    num_params = LONGEST

    def encode(self, params):
        if not params.extra_args:
            return None
        script = params.extra_args.get("script")
        if not isinstance(script, list) or len(script) >= LONGEST:
            raise ValueError(f"script must be a list of fewer than {LONGEST} ids")
        return [*script, *[0] * (LONGEST - len(script))]

    def apply(self, logits, params, output_index):
        import jax.numpy as jnp

        place = jnp.minimum(output_index, LONGEST - 1)[:, None]
        token = jnp.take_along_axis(params, place, axis=1)
        return jnp.where(jnp.arange(logits.shape[1]) == token, 0.0, -jnp.inf)
