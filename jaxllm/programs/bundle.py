"""Bundles: an engine's programs, compiled ahead by `jaxllm plan --out` and loaded at its start.

A bundle is a directory with a file per program and a manifest. The manifest says what the programs
were made for, and the hash of each file. An engine that differs from that, or cannot load the
programs, compiles its own, and logs why.

**To load a bundle runs the code in it**, since programs are machine code. The hashes are checked
before anything is loaded, and detect damage. They do not protect from somebody who can write the
directory, since it holds the manifest too.
"""

import json
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxllm.errors import JaxLLMError, refused
from jaxllm.files import parse_json
from jaxllm.logging import init_logger
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.gpu_compiler import UNTIMED, tiles_of
from jaxllm.plan.memory import format_bytes
from jaxllm.plural import counted
from jaxllm.programs.declare import stage_of
from jaxllm.programs.identity import foreign_code, program_identity
from jaxllm.programs.serialized import from_bytes, hash_of, to_bytes

logger = init_logger(__name__)

_MANIFEST = "manifest.json"
_FORMAT = 2


_UNTIMED_TILES = (
    "program bundle %s was compiled without a GPU: the tiles of its matrix products are from a "
    "formula, not timed, and may be slow. Start once here without the bundle, with "
    "XLA_FLAGS=--xla_gpu_dump_autotune_results_to=FILE.txt, and make the bundle again with "
    "--gpu-autotune-results FILE.txt"
)


class BundleError(JaxLLMError):
    """A bundle cannot be made or used. It never keeps an engine from starting."""


class BundleWriter:
    """Makes a bundle of a plan's programs. It is complete only after `finish`."""

    def __init__(self, directory: Path, plan: EnginePlan):
        if foreign := foreign_code(plan):
            raise BundleError(
                f"{foreign} would be in the programs, and a bundle cannot tell when code outside "
                "of jaxllm changes; start without a bundle, the compilation cache serves you"
            )
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise refused("out", str(directory), "the directory is not empty; give a new one")
        self._directory = directory
        self._made_for = program_identity(plan)
        device = plan.stages[0].mesh.devices.flat[0]
        self._tiles = tiles_of(plan.chip, device, plan.autotune_results)
        self._programs: dict[str, dict[str, Any]] = {}

    def add(self, key: Hashable, compiled: jax.stages.Compiled) -> None:
        data = to_bytes(compiled)
        file = f"{str(key).replace(' ', '_')}.pickle"
        (self._directory / file).write_bytes(data)
        self._programs[str(key)] = {"file": file, "bytes": len(data), "sha256": hash_of(data)}

    def finish(self) -> str:
        """Write the manifest; return a summary for people."""
        manifest = {
            "format": _FORMAT,
            "made_for": self._made_for,
            "gpu_tiles": self._tiles,
            "programs": self._programs,
        }
        text = json.dumps(manifest, indent=1) + "\n"
        (self._directory / _MANIFEST).write_text(text, encoding="utf-8")
        size = sum(program["bytes"] for program in self._programs.values())
        return f"{self._directory}: {counted(len(self._programs), 'program')}, {format_bytes(size)}"


class Bundle:
    """A bundle on disk. Its manifest has been read, and none of its code has run."""

    def __init__(self, directory: Path):
        self._directory = directory
        try:
            manifest = parse_json((directory / _MANIFEST).read_bytes())
            if manifest["format"] != _FORMAT:
                raise BundleError(f"its format is {manifest['format']}, and {_FORMAT} is known")
            self._made_for: dict[str, str] = dict(manifest["made_for"])
            self._programs = {
                name: (str(program["file"]), str(program["sha256"]))
                for name, program in manifest["programs"].items()
            }
            self._tiles: str | None = manifest["gpu_tiles"]
            self.num_blocks = int(self._made_for["num_blocks"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BundleError(f"its manifest cannot be read: {error!r}") from error

    def check(self, plan: EnginePlan) -> None:
        """Raise BundleError if the programs were not made for the plan."""
        if foreign := foreign_code(plan):
            raise BundleError(f"{foreign} would be in the programs, which no bundle has")
        there, here = self._made_for, program_identity(plan)
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if names:
            name, *others = names
            raise BundleError(
                f"it was made for {name} {there.get(name)!r}, and here it is {here.get(name)!r}"
                + (f" ({', '.join(others)} differ, too)" if others else "")
            )

    def load(self, plan: EnginePlan, keys: Iterable[Hashable]) -> dict[Hashable, Any]:
        """Load the executables of these programs on the devices of the plan."""
        loaded = {}
        for key in keys:
            if str(key) not in self._programs:
                raise BundleError(f"it lacks the program {key}")
            file, wanted = self._programs[str(key)]
            if Path(file).name != file:
                raise BundleError(f"its manifest refers to {file!r}, outside its directory")
            data = (self._directory / file).read_bytes()
            if hash_of(data) != wanted:
                raise BundleError(f"{file} is damaged: it has another hash than the manifest says")
            loaded[key] = from_bytes(data, stage_of(plan, key).mesh)
        if self._tiles == UNTIMED:
            logger.warning(_UNTIMED_TILES, self._directory)
        elif self._tiles is not None:
            logger.info("program bundle %s: tiles of products %s", self._directory, self._tiles)
        return loaded


def open_bundle(directory: Path) -> Bundle | None:
    """Read a bundle's manifest; return None, with a warning, if it cannot be read."""
    try:
        return Bundle(directory)
    except BundleError as error:
        warn(directory, error)
        return None


def load_programs(plan: EnginePlan, programs: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    """Load the programs of the plan's bundle; return none, with a warning, if that fails."""
    if plan.program_bundle is None:
        return {}
    try:
        bundle = Bundle(plan.program_bundle)
        bundle.check(plan)
        return bundle.load(plan, programs)
    except Exception as error:
        # Whatever the reason why another machine's program cannot be loaded, we compile our own.
        warn(plan.program_bundle, error)
        return {}


def warn(directory: Path, error: Exception) -> None:
    """Log why a bundle is not used."""
    reason = str(error) if isinstance(error, JaxLLMError) else f"{type(error).__name__}: {error}"
    logger.warning("program bundle %s is not used: %s; compiling instead", directory, reason)
