"""Puts the deployments together: frontends, and the engines behind them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.ending import patience_s
from jaxllm.engine.scaling import KV_TARGET, kv_target
from jaxllm.errors import ValidationError, refused
from jaxllm.server.options import ServerOptions
from jaxllm.server.ray.frontend import Frontend
from jaxllm.server.ray.models import read_models
from jaxllm.server.ray.options import Asked, FleetOptions, read, typed
from jaxllm.server.ray.replica import EngineReplica, ReportingReplica

if TYPE_CHECKING:
    from ray.serve import Application

_POLICY = "jaxllm.server.ray.autoscaling:LoadPolicy"
_ROUTER = "jaxllm.server.ray.request_router.PolicyRouter"
# How much longer than an engine's process a replica may take to stop.
_LONGER_S = 5.0
_MAX_ONGOING = 512
# How long a prompt that found all replicas full waits at most before it looks again. The engines
# have prompts that wait in them, so none is idle meanwhile.
_MAX_BACKOFF_S = 0.1
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
        import ray.serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValidationError(
            f"Ray Serve needs {error.name}; install it with pip install 'jaxllm[serve]'"
        ) from error

    if options.get("models") is not None:
        from jaxllm.server.ray.ingress import Ingress

        models = read_models(options)
        engines: Any = [_engines(one.deployment, one.asked) for one in models.models]
        return _frontends(Ingress, models.fleet, models.server).bind(engines, options)
    asked = read(options)
    frontends = _frontends(Frontend, asked.fleet, asked.server)
    return frontends.bind(_engines("Engine", asked), options)


def _engines(name: str, asked: Asked) -> Any:
    """The replicas of one model."""
    from ray import serve

    deployment: Any = serve.deployment  # a decorator, with and without arguments
    max_prompts = _max_prompts(asked)
    scaling = asked.fleet.autoscaling_config or {}
    kind = EngineReplica if kv_target(scaling) is None else ReportingReplica
    engines = deployment(kind).options(
        name=name,
        max_ongoing_requests=max_prompts + _NUM_RESERVED,
        graceful_shutdown_timeout_s=asked.server.shutdown_timeout
        + patience_s(asked.config)
        + _LONGER_S,
        **_of_engines(asked),
    )
    return engines.bind(asked.engine, max_prompts)


def _frontends(kind: type, fleet: FleetOptions, server: ServerOptions) -> Any:
    from ray import serve

    deployment: Any = serve.deployment
    return deployment(serve.ingress()(kind)).options(
        name="Frontend",
        num_replicas=fleet.num_frontends,
        max_ongoing_requests=_MAX_IN_FRONTEND,
        graceful_shutdown_timeout_s=server.shutdown_timeout,
        ray_actor_options=fleet.frontend_actor_options or {},
    )


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
                "max_backoff_s": _MAX_BACKOFF_S,
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
        "placement_group_bundles",
        "placement_group_strategy",
        "placement_group_bundle_label_selector",
    ):
        if (value := getattr(fleet, name)) is not None:
            options[name] = value
    if fleet.autoscaling_config is not None:
        options["autoscaling_config"] = _scaling(fleet.autoscaling_config)
    return options


def _scaling(given: Mapping[str, Any]) -> dict[str, Any]:
    """What Ray Serve gets of an `autoscaling_config`. It would ignore names that it does not
    know."""
    from ray.serve.config import AutoscalingConfig

    scaling = dict(given)
    scaling.pop(KV_TARGET, None)
    for name, value in scaling.items():
        if name not in AutoscalingConfig.model_fields:
            known = ", ".join((*AutoscalingConfig.model_fields, KV_TARGET))
            raise refused(f"autoscaling_config.{name}", value, f"its fields are {known}")
    if (target := kv_target(given)) is not None:
        scaling["policy"] = {"policy_function": _POLICY, "policy_kwargs": {KV_TARGET: target}}
    return scaling
