"""Plans a second model that drafts: whether it fits the first one, and what it takes.

It runs on the same devices, in the same dtype. Each of its layers has a cache of its own, in the
blocks of the group that keeps all tokens, whatever the layer's window: the block tables are those
of the model, and a cached prefix is one of both. A draft that has not read a part of a text can
still read it later, which it could not if blocks behind a window were gone.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jaxllm_kernels.experts.api import ExpertsOp
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig

from jaxllm.cache_config import CacheConfig
from jaxllm.cache_groups import Window
from jaxllm.errors import ValidationError, refused
from jaxllm.files import read_bytes, read_json
from jaxllm.models.architecture import read_architecture
from jaxllm.models.base import Model
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.specs import Architecture
from jaxllm.plan.abstract import abstract_model
from jaxllm.plan.choose_kv_cache import KVCachePlan, with_kv_cache
from jaxllm.plan.draft_plan import DraftPlan
from jaxllm.plural import counted
from jaxllm.quantization.config_file import read_config
from jaxllm.speculative_config import Speculation
from jaxllm.weights.checkpoint import resolve_model_dir
from jaxllm.weights.loader import weights_bytes

_OPTION = "speculative_config"
_MAX_TOKENIZER_BYTES = 200_000_000
_SMALLEST_READ = 16


@dataclass(frozen=True, kw_only=True)
class DraftModelPlan(DraftPlan):
    """The draft model of a plan."""

    architecture: Architecture
    model_class: type[Model]
    kv_cache: KVCachePlan | None  # None: keys and values are cached in its type
    # The numbers of tokens of the programs in which it reads texts, ascending.
    read_sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.architecture.name}, {counted(self.architecture.num_layers, 'layer')}"


def plan_draft_model(
    speculation: Speculation,
    *,
    target: Architecture,
    target_dir: Path,
    windows: tuple[Window, ...],
    has_latents: bool,
    download_dir: str | None,
    cache: CacheConfig | None,
    reads_weights: bool,
    max_model_len: int,
    max_num_batched_tokens: int,
    dtype: Any,
    mesh: Mesh,
    num_shards: int,
    choose_products: Callable[[Architecture], Architecture],
    choose_experts: Callable[[Architecture], ExpertsOp | None],
) -> tuple[Speculation, DraftModelPlan]:
    """Plan the draft model that is asked for, or refuse it if it does not fit the target. The
    draft's caches are left open. Return what is asked for as well, with the longest sequence that
    gets drafts.

    Args:
      windows: those of the target's cache groups.
      has_latents: whether the target keeps latents.
      cache: what is asked of the draft's cache, if it has codes; None: it has its own type.
      reads_weights: whether there are checkpoints of weights.
    """
    asked = speculation.draft_model
    assert asked is not None, speculation
    model_dir = resolve_model_dir(asked.model, asked.revision, download_dir)
    hf_config = read_config(model_dir)
    architecture = read_architecture(hf_config, max_model_len=asked.max_model_len)
    architecture = choose_products(architecture)
    longest = _check_length(asked.max_model_len, architecture.max_model_len, max_model_len)
    _check_vocabulary(asked.model, architecture, model_dir, target, target_dir)
    if None not in windows:
        raise _does_not_fit(
            asked.model,
            "every layer of the model has a window, and a draft reads texts also behind windows",
        )
    try:
        architecture.check(num_shards)
    except ValidationError as error:
        raise _does_not_fit(asked.model, f"of the draft: {error}") from error
    kv_cache = None
    if cache is not None:
        architecture, kv_cache = with_kv_cache(
            architecture,
            cache,
            model_dir,
            hf_config=hf_config,
            dtype=dtype,
            reads_weights=reads_weights,
        )
    model_class = ModelRegistry.resolve([architecture.name])
    model = abstract_model(model_class, architecture, dtype, mesh)
    if model.state_configs:
        raise _does_not_fit(
            asked.model, "it has recurrent layers, and drafts are read from keys and values"
        )
    configs = [c for c in model.attention_configs if isinstance(c, AttentionConfig)]
    if len(configs) < len(model.attention_configs):
        raise _does_not_fit(asked.model, "it keeps latents, and drafts keep keys and values")
    if has_latents:
        raise _does_not_fit(asked.model, "the model keeps latents, and drafts keys and values")
    plan = DraftModelPlan(
        model_dir=model_dir,
        architecture=architecture,
        model_class=model_class,
        experts=choose_experts(architecture),
        kv_cache=kv_cache,
        attention_configs=tuple(configs),
        windows=(None,) * len(configs),
        weights_bytes=weights_bytes(model, mesh),
        read_sizes=_read_sizes(max_num_batched_tokens),
    )
    asked = dataclasses.replace(asked, max_model_len=longest)
    return dataclasses.replace(speculation, draft_model=asked), plan


def _read_sizes(most: int) -> tuple[int, ...]:
    """Powers of four: few programs, and their padding is that of a small model."""
    sizes = [min(_SMALLEST_READ, most)]
    while sizes[-1] < most:
        sizes.append(min(4 * sizes[-1], most))
    return tuple(sizes)


def _check_length(asked: int | None, of_draft: int, of_target: int) -> int:
    """The longest sequence that gets drafts."""
    if asked is None and of_draft < of_target:
        raise ValidationError(
            f"{_OPTION}: the draft model has {of_draft} positions and the engine "
            f"max_model_len={of_target}; give {_OPTION} max_model_len={of_draft} to draft only in "
            "sequences up to there, or lower the engine's",
            parameter=_OPTION,
        )
    if asked is not None and asked > min(of_draft, of_target):
        raise ValidationError(
            f"{_OPTION}: max_model_len={asked} is above the {of_draft} positions of the draft "
            f"model or the engine's max_model_len={of_target}; lower it",
            parameter=_OPTION,
            value=asked,
        )
    return asked or of_target


def _check_vocabulary(
    name: str, draft: Architecture, draft_dir: Path, target: Architecture, target_dir: Path
) -> None:
    """Refuse a draft whose ids mean other tokens. Sizes may differ by padding, which families have
    more or less of, but only if both tokenizers say so."""
    files = [directory / "tokenizer.json" for directory in (target_dir, draft_dir)]
    if not all(file.exists() for file in files):
        if draft.vocab_size != target.vocab_size:
            raise _does_not_fit(
                name,
                f"it has vocab_size={draft.vocab_size}, the model has {target.vocab_size}, and "
                "without both tokenizer.json nothing says which tokens are the same",
            )
        return
    texts = [read_bytes(file, most=_MAX_TOKENIZER_BYTES) for file in files]
    if texts[0] == texts[1]:
        return
    of_target, of_draft = (_token_ids(file) for file in files)
    for token in sorted(of_target.keys() | of_draft.keys(), key=lambda t: of_target.get(t, -1)):
        ids = of_target.get(token), of_draft.get(token)
        if ids[0] != ids[1]:
            raise _does_not_fit(
                name,
                f"the token {token[:40]!r} has id {ids[0]} in the model's tokenizer and id "
                f"{ids[1]} in the draft's",
            )


def _token_ids(file: Path) -> dict[str, int]:
    """The ids of all tokens of a tokenizer.json."""
    content = read_json(file, most=_MAX_TOKENIZER_BYTES)
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # of pairs of token and score, or of tokens
        pieces = (entry[0] if isinstance(entry, list) else entry for entry in vocabulary)
        vocabulary = {piece: index for index, piece in enumerate(pieces)}
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    return {**vocabulary, **added}


def _does_not_fit(name: str, why: str) -> ValidationError:
    return refused(f"{_OPTION}: model", name, f"it cannot draft for this model: {why}")
