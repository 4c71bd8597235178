"""What is asked of the fleet, beside its engines and the server."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config import EngineConfig, ParallelConfig, option
from jaxllm.engine.router import RoutingPolicy
from jaxllm.engine.scaling import kv_target
from jaxllm.errors import refused
from jaxllm.files import parse_json
from jaxllm.option_types import check_type
from jaxllm.server.options import ServerOptions


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Ray Serve"""

    models: list | None = option(
        None,
        "Several models behind one server, each an object of its own options: model, "
        'served_model_name, num_replicas, ... A request\'s "model" says which answers.',
    )
    num_replicas: int | None = option(None, "Engines. Default: 1, or what autoscaling_config says.")
    autoscaling_config: dict | None = option(
        None,
        "Ray Serve's: min_replicas, max_replicas, target_ongoing_requests, ...; and ours beside "
        "them, target_kv_cache_usage.",
    )
    ray_actor_options: dict | None = option(
        None, 'Of each engine: {"num_gpus": 1}, or {"resources": {"TPU": 4}}.'
    )
    placement_group_bundles: list | None = option(
        None,
        "Resources of each engine, of which it runs in the first bundle; with nnodes, each rank in "
        "a bundle of its own. Default with nnodes: for each the resources in ray_actor_options.",
    )
    placement_group_strategy: str | None = option(None, "PACK, SPREAD, STRICT_PACK, ...")
    placement_group_bundle_label_selector: list | None = option(
        None, "Labels that the nodes of the bundles must have, such as those of one TPU slice."
    )
    max_ongoing_requests: int | None = option(
        None,
        "Most requests that one engine has. Others wait in the frontend for whichever is free "
        "first. Default: twice max_num_seqs of the engine, or 512.",
    )
    routing_policy: RoutingPolicy = option(
        "prefix", "Who serves a request: 'prefix', 'least_work' or 'random'."
    )
    max_attempts: int = option(
        3, "Engines that a request is given to, one after another, before its answer has begun."
    )
    num_frontends: int = option(
        1,
        "Replicas of the server, which handle HTTP and text. Each routes by what went through it.",
    )
    frontend_actor_options: dict | None = option(None, "The same as ray_actor_options, of these.")

    def validate(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            check_type(f.name, getattr(self, f.name), hints[f.name])
        for name in ("num_replicas", "max_ongoing_requests", "max_attempts", "num_frontends"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise refused(name, value, "it must be at least 1")
        if self.num_replicas is not None and self.autoscaling_config is not None:
            raise refused(
                "num_replicas",
                self.num_replicas,
                "it and autoscaling_config contradict each other; give one of them",
            )
        if self.autoscaling_config is not None:
            kv_target(self.autoscaling_config)
        for name in ("placement_group_strategy", "placement_group_bundle_label_selector"):
            if (value := getattr(self, name)) is not None and self.placement_group_bundles is None:
                raise refused(name, value, "it needs placement_group_bundles")


class Asked(typing.NamedTuple):
    """All options, by whom they are for."""

    engine: dict[str, Any]  # as the keyword arguments of `LLM`
    config: EngineConfig
    server: ServerOptions
    fleet: FleetOptions


def read(options: Mapping[str, Any]) -> Asked:
    """Sort and check options. Raise ValidationError here, before anything is started."""
    of_server, of_fleet = (_given(one, options) for one in (ServerOptions, FleetOptions))
    server, fleet = read_server(of_server), read_fleet(of_fleet)
    others = {
        name: value
        for name, value in options.items()
        if name not in of_server and name not in of_fleet
    }
    config = EngineConfig.create(**others)
    for name in ("distributed_executor_backend", "node_rank", "master_addr", "master_port"):
        if name in others and others[name] != getattr(_ONE_HOST, name):
            raise refused(
                name,
                others[name],
                "the replica starts the ranks of its engine; say with nnodes how many",
            )
    if config.hand_over.gives:
        raise refused(
            "kv_role",
            config.hand_over.kv_role,
            "an answer of a fleet cannot say which of its engines has its blocks; give "
            "'kv_consumer', or serve each engine by 'jaxllm serve'",
        )
    return Asked(others, config, server, _over_hosts(fleet, config.parallel.nnodes))


def _over_hosts(fleet: FleetOptions, num_ranks: int | str) -> FleetOptions:
    """The options with a bundle for each rank of an engine over several hosts."""
    if num_ranks == 1:
        return fleet
    if num_ranks == "auto":
        raise refused("nnodes", num_ranks, "under Ray Serve say how many ranks an engine has")
    bundles = fleet.placement_group_bundles
    if bundles is None:
        bundles = [_bundle(fleet.ray_actor_options or {})] * int(num_ranks)
    if len(bundles) != num_ranks:
        raise refused(
            "placement_group_bundles",
            bundles,
            f"nnodes={num_ranks}; give a bundle for each rank of an engine",
        )
    return dataclasses.replace(fleet, placement_group_bundles=bundles)


def _bundle(actor: Mapping[str, Any]) -> dict[str, float]:
    """What an actor of Ray Serve with these options takes."""
    bundle = {"CPU": actor.get("num_cpus", 1), "GPU": actor.get("num_gpus", 0)}
    bundle |= {"memory": actor.get("memory", 0), **actor.get("resources", {})}
    return {name: amount for name, amount in bundle.items() if amount}


def read_server(options: Mapping[str, Any]) -> ServerOptions:
    """Check the options of the server."""
    server = dict(options)
    hints = typing.get_type_hints(ServerOptions)
    for name, value in server.items():
        if name in _OF_ONE_SERVER:
            raise refused(name, value, _OF_ONE_SERVER[name])
        if typing.get_origin(hints[name]) is tuple and isinstance(value, list):
            server[name] = tuple(value)
        check_type(name, server[name], hints[name])
    # Serve's proxy listens, and who may reach it is up to its http_options.
    checked = ServerOptions(host="0.0.0.0", **server)
    checked.validate()
    return checked


def read_fleet(options: Mapping[str, Any]) -> FleetOptions:
    """Check the options of Ray Serve."""
    fleet = FleetOptions(**options)
    fleet.validate()
    return fleet


def typed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `serve run`, where each is a text, and of a config file, where it is not;
    those of each of `models` likewise."""
    hints: dict[str, Any] = {}
    for part in (*typing.get_type_hints(EngineConfig).values(), ServerOptions, FleetOptions):
        hints |= typing.get_type_hints(part)
    options = {
        name: _value(name, value, hints[name])
        if isinstance(value, str) and name in hints
        else value
        for name, value in arguments.items()
    }
    if isinstance(models := options.get("models"), list):
        options["models"] = [typed(one) if isinstance(one, Mapping) else one for one in models]
    return options


def _value(name: str, text: str, hint: Any) -> Any:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = {typing.get_origin(one) or one for one in (typing.get_args(hint) if union else (hint,))}
    if kinds & {str, typing.Literal} and not (kinds & {int, float} and _is_number(text)):
        return text
    if tuple in kinds and not text.startswith("["):
        return (text,)
    try:
        return parse_json(text)
    except ValueError:
        raise refused(name, text, "write it as JSON: 4096, true, {...} or [...]") from None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _given(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the given options that are fields of a kind."""
    return {f.name: given[f.name] for f in dataclasses.fields(kind) if f.name in given}


_ONE_HOST = ParallelConfig()

# Options of a server that listens itself, and those whose state no other frontend would see.
_BY_SERVE = "Ray Serve's proxy listens; give this to Serve (http_options)"
_BY_ADMIN = "an order would reach the engines of the moment, and none that starts later"
_OF_ONE_SERVER = {
    **dict.fromkeys(("host", "port", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"), _BY_SERVE),
    **dict.fromkeys(("max_header_bytes", "access_log"), _BY_SERVE),
    "api_server_count": "use num_frontends",
    "batch_dir": "frontends come and go; batches are for `jaxllm serve` and `jaxllm run-batch`",
    "response_store": "frontends come and go, and what one keeps is not in the others",
    **dict.fromkeys(("admin_api_key", "admin_api_key_file", "admin_without_key"), _BY_ADMIN),
    "lora_dirs": _BY_ADMIN + "; lora_modules names adapters for all",
}
