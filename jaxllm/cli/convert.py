"""`jaxllm convert`: writes weights as an engine with these options holds them."""

import argparse
import shutil
from pathlib import Path

from jaxllm.cli.arguments import add_engine_arguments, engine_options_from
from jaxllm.errors import ValidationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="Directory to write; made if needed. Start engines from it with --load-format orbax "
        "and the same options.",
    )
    add_engine_arguments(parser, without=("load_format",))


def run(args: argparse.Namespace) -> None:
    out = Path(args.out)
    if out.exists() and any(out.iterdir()):
        raise ValidationError(f"{out} is not empty; give a new directory, or remove it")
    from jaxllm.config import EngineConfig
    from jaxllm.plan.make_plan import make_plan
    from jaxllm.weights import converted
    from jaxllm.weights.loader import load_parts

    config = EngineConfig.create(**engine_options_from(args))
    if config.speculation.read() is not None:
        raise ValidationError("a draft model is converted by a command of its own; leave it out")
    plan = make_plan(config)
    parts = [(plan.abstract_model(stage), stage.mesh) for stage in plan.stages]
    states = load_parts(plan.model_dir, parts)
    out.mkdir(parents=True, exist_ok=True)
    for file in plan.model_dir.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".gguf", ".bin", ".pt"):
            shutil.copyfile(file, out / file.name)
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    converted.save(out, parts, states)
    print(f"{out}: {plan.architecture.name} as {len(parts)} x {parts[0][1].size} devices hold it")
