"""Puts the deployments together: frontends, and the engines behind them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ValidationError
from jaxllm.server.ray.frontend import Frontend
from jaxllm.server.ray.options import Asked, read, typed
from jaxllm.server.ray.replica import EngineReplica

if TYPE_CHECKING:
    from ray.serve import Application

_ROUTER = "jaxllm.server.ray.request_router.PolicyRouter"
# An engine may need as long to stop after its last request.
_STOP_S = 15.0
_MAX_ONGOING = 512
# Places of a replica that no prompt takes: for aborts and for questions about its figures.
_NUM_RESERVED = 64
# A frontend has its own limits.
_MAX_IN_FRONTEND = 1 << 20


def app(arguments: Mapping[str, Any]) -> "Application":
    """Build an application from the arguments of `serve run` or of a config file."""
    return build(**typed(arguments))


def build(**options: Any) -> "Application":
    """Build an application of the options of `LLM`, of `jaxllm serve` and of
    `jaxllm.server.ray.options`. `serve.run` starts it. Invalid options are refused here."""
    try:
        from ray import serve
    except ModuleNotFoundError as error:
        raise ValidationError(
            f"Ray Serve needs {error.name}; install it with pip install 'jaxllm[serve]'"
        ) from error

    asked = read(options)
    fleet, shutdown_s = asked.fleet, asked.server.shutdown_timeout
    deployment: Any = serve.deployment  # a decorator, with and without arguments
    max_prompts = _max_prompts(asked)
    engines = deployment(EngineReplica).options(
        name="Engine",
        max_ongoing_requests=max_prompts + _NUM_RESERVED,
        graceful_shutdown_timeout_s=shutdown_s + _STOP_S,
        **_of_engines(asked),
    )
    frontends = deployment(serve.ingress()(Frontend)).options(
        name="Frontend",
        num_replicas=fleet.num_frontends,
        max_ongoing_requests=_MAX_IN_FRONTEND,
        graceful_shutdown_timeout_s=shutdown_s,
        ray_actor_options=fleet.frontend_actor_options or {},
    )
    return frontends.bind(engines.bind(asked.engine, max_prompts), options)


def _max_prompts(asked: Asked) -> int:
    """How many prompts one engine has at most."""
    seqs = asked.config.scheduler.max_num_seqs
    return asked.fleet.max_ongoing_requests or (2 * seqs if seqs else _MAX_ONGOING)


def _of_engines(asked: Asked) -> dict[str, Any]:
    """The options of the engines' deployment; what is not given has Serve's own defaults."""
    from ray.serve.config import RequestRouterConfig

    fleet = asked.fleet
    options = {
        "request_router_config": RequestRouterConfig.model_validate(
            {
                "request_router_class": _ROUTER,
                "request_router_kwargs": {
                    "policy": fleet.routing_policy,
                    "num_reserved": _NUM_RESERVED,
                },
            }
        ),
        "ray_actor_options": fleet.ray_actor_options or {},
    }
    for name in (
        "num_replicas",
        "autoscaling_config",
        "placement_group_bundles",
        "placement_group_strategy",
    ):
        if (value := getattr(fleet, name)) is not None:
            options[name] = value
    return options
