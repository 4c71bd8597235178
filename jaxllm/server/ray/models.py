"""The options of several models behind one ingress: those of each model, and those of all."""

import dataclasses
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import ValidationError, refused
from jaxllm.openai.served_adapters import read_lora_modules
from jaxllm.parsers.options import ParserOptions
from jaxllm.server.options import ServerOptions
from jaxllm.server.ray.options import Asked, FleetOptions, read, read_fleet, read_server

# Options of the server that each model has for itself. All others are of all models.
_OF_A_MODEL = {f.name for f in dataclasses.fields(ParserOptions)} | {
    "served_model_name", "lora_modules", "lora_resolver_dirs", "lora_resolver", "chat_template",
    "trust_request_chat_template", "chat_template_timeout", "max_queued_requests",
    "max_queued_tokens",
}  # fmt: skip
_OF_INGRESS = {"num_frontends", "frontend_actor_options"}
_OF_ALL = {f.name for f in dataclasses.fields(ServerOptions)} - _OF_A_MODEL | _OF_INGRESS


class AskedModel(typing.NamedTuple):
    """One of several models."""

    deployment: str  # the name of its engines' deployment
    names: tuple[str, ...]  # what "model" in a request may be: of the model, and of its adapters
    asked: Asked


class AskedModels(typing.NamedTuple):
    models: list[AskedModel]
    server: ServerOptions  # without what models have for themselves
    fleet: FleetOptions


def read_models(options: Mapping[str, Any]) -> AskedModels:
    """Sort and check options with `models`. Raise ValidationError before anything is started."""
    options = dict(options)
    entries = options.pop("models")
    if not isinstance(entries, list | tuple) or not entries:
        raise refused("models", entries, "give a list of models, each an object of its options")
    for name, value in options.items():
        if name not in _OF_ALL:
            raise refused(
                name,
                value,
                "beside models there are only options of the server as a whole; give this one to "
                "each model that it is for, or look at its spelling",
            )
    if options.get("enable_tokenizer_info_endpoint"):
        raise refused(
            "enable_tokenizer_info_endpoint",
            True,
            "a request for it names no model; start one model alone for it",
        )
    of_server = {name: value for name, value in options.items() if name not in _OF_INGRESS}
    server = read_server(of_server)
    fleet = read_fleet({name: value for name, value in options.items() if name in _OF_INGRESS})
    models: list[AskedModel] = []
    for place, entry in enumerate(entries):
        models.append(_model(place, entry, of_server, [one.deployment for one in models]))
    _check_names(models)
    return AskedModels(models, server, fleet)


def _model(
    place: int, entry: object, of_server: Mapping[str, Any], deployments: list[str]
) -> AskedModel:
    where = f"models[{place}]"
    if not isinstance(entry, Mapping):
        raise refused(where, entry, "it must be an object of the model's options")
    for name, value in entry.items():
        if name in _OF_ALL:
            raise refused(f"{where}.{name}", value, "it is for all models; give it beside models")
        if name == "models":
            raise refused(f"{where}.models", value, "a model has none within it")
    try:
        asked = read({**of_server, **entry})
        adapters = read_lora_modules(asked.server.lora_modules)
    except ValidationError as error:
        raise ValidationError(
            f"{where}: {error}", parameter=error.parameter, value=error.value
        ) from error
    names = asked.server.served_model_name or (asked.config.model.model,)
    deployment = "Engine-" + re.sub(r"[^A-Za-z0-9_.-]", "-", names[0])
    if deployment in deployments:
        deployment += f"-{place}"
    return AskedModel(deployment, (*names, *(one.lora_name for one in adapters)), asked)


def _check_names(models: list[AskedModel]) -> None:
    """Refuse what would leave it open which model a request means."""
    by_name: dict[str, int] = {}
    by_directory: dict[Path, int] = {}
    for place, one in enumerate(models):
        server = one.asked.server
        for name in one.names:
            if name in by_name:
                first = by_name[name]
                where = f"models[{first}]" if first == place else f"models[{first}] and [{place}]"
                raise refused(
                    "served_model_name",
                    name,
                    f"{where} both have this name; give each model and each adapter a name of "
                    "its own",
                )
            by_name[name] = place
        for directory in server.lora_resolver_dirs:
            resolved = Path(directory).expanduser().resolve()
            if resolved in by_directory:
                raise refused(
                    "lora_resolver_dirs",
                    directory,
                    f"models[{by_directory[resolved]}] and [{place}] would both look up a name "
                    "there; give each a directory of its own",
                )
            by_directory[resolved] = place
