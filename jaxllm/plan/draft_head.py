"""Plans a head that drafts: whether it fits the model, and what it takes.

Its layer reads every token in the same step as the model, so it keeps its keys in the blocks of the
cache group that has its window, like a layer of the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jaxllm_kernels.experts.api import ExpertsOp

from jaxllm.cache_groups import window_of
from jaxllm.errors import UnsupportedModelError, ValidationError, refused
from jaxllm.files import read_json
from jaxllm.layers.context import MixerConfig
from jaxllm.models.decoder import DecoderForCausalLM
from jaxllm.models.draft_head import HeadSpec
from jaxllm.models.read_eagle import read_eagle
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.specs import Architecture
from jaxllm.plan.draft_plan import DraftPlan
from jaxllm.speculative_config import Speculation
from jaxllm.weights.checkpoint import resolve_model_dir
from jaxllm.weights.loader import weights_bytes

_OPTION = "speculative_config"


@dataclass(frozen=True, kw_only=True)
class DraftHeadPlan(DraftPlan):
    """The head of a plan."""

    spec: HeadSpec

    @property
    def name(self) -> str:
        return self.spec.kind.__name__


def plan_draft_head(
    speculation: Speculation,
    *,
    target: Architecture,
    target_dir: Path,
    target_class: type[Any],
    target_configs: tuple[MixerConfig, ...],
    caches_codes: bool,
    download_dir: str | None,
    max_model_len: int,
    dtype: Any,
    mesh: Mesh,
    num_shards: int,
    choose_experts: Callable[[Architecture], ExpertsOp | None],
) -> DraftHeadPlan | None:
    """Plan the head that is asked for, if one is, or refuse it if it does not fit the target, which
    `target_class` runs with attentions of `target_configs`. `caches_codes` is whether its keys and
    values are codes."""
    asked, method = speculation.head, speculation.method
    if asked is None:
        return None
    if not issubclass(target_class, DecoderForCausalLM):
        raise _does_not_fit(method, f"{target.name} runs by a class of its own")
    if target.scheme is not None:
        raise _does_not_fit(method, "heads are not run beside weights that are codes")
    if caches_codes:
        raise _does_not_fit(method, "a head caches no codes; give kv_cache_dtype='bfloat16'")
    if target.num_positions is not None or target.per_layer_input is not None:
        raise _does_not_fit(method, f"no head is known for the embeddings of {target.name}")
    try:
        if asked.model is None:
            model_dir, spec = target_dir, _own_head(target)
        else:
            model_dir = resolve_model_dir(asked.model, asked.revision, download_dir)
            fields = read_json(model_dir / "config.json")
            assert method in ("eagle", "eagle3"), method
            spec = read_eagle(method, fields, target, max_model_len=max_model_len)
        spec.check(num_shards)
    except (ValidationError, UnsupportedModelError) as error:
        raise _does_not_fit(method, str(error)) from error
    head = spec.abstract(dtype, num_shards)
    configs = head.attention_configs
    if {*map(type, configs)} != {*map(type, target_configs)}:
        raise _does_not_fit(
            method, "one of the model and the head keeps latents, the other keys and values"
        )
    return DraftHeadPlan(
        model_dir=model_dir,
        spec=spec,
        experts=choose_experts(target) if asked.model is None else None,
        attention_configs=configs,
        windows=tuple(map(window_of, configs)),
        weights_bytes=weights_bytes(head, mesh),
    )


def _own_head(target: Architecture) -> HeadSpec:
    read = ModelRegistry.family(target.name).draft_head
    if read is None:
        raise UnsupportedModelError(
            f"layers that draft are not read from checkpoints of {target.name}"
        )
    return read(target)


def _does_not_fit(method: str, why: str) -> ValidationError:
    return refused(f"{_OPTION}: method", method, why)
