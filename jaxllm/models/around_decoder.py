"""The maps of decoders that stand beside towers for images or sound."""

import dataclasses

from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.tower import TowerSpec


def inside_larger_model(names: CheckpointMap) -> CheckpointMap:
    """The map of a decoder whose towers are not loaded."""
    towers = r"(model\.)?(vision_\w+|audio_\w+|multi_modal_\w+|embed_(vision|audio))\..*"
    # As releases have it, then as transformers from 4.52 on writes it.
    renamed = (
        {"model": "language_model.model", "lm_head": "language_model.lm_head"},
        {"model": "model.language_model"},
    )
    first, *others = [
        its.with_names(**names_of).ignoring(towers)
        for names_of in renamed
        for its in _layouts(names)
    ]
    return dataclasses.replace(first, others=tuple(others))


def beside_visual(
    names: CheckpointMap, tower: TowerSpec | None, *, is_inside: bool
) -> CheckpointMap:
    """The map of a decoder of Qwen's, whose tower is called `visual`; None: it is not loaded.
    Releases have both inside `model`, or beside each other; transformers may write either."""
    ways = ("model", "visual"), ("model.language_model", "model.visual")
    layouts = []
    for its in _layouts(names):
        for decoder, visual in reversed(ways) if is_inside else ways:
            layout = its.with_names(model=decoder)
            if tower is None:
                layouts.append(layout.ignoring(r"(model\.)?visual\..*"))
            else:
                inside = tower.names(CheckpointMap()).with_names(visual=visual)
                layouts.append(dataclasses.replace(layout, parts={"tower": inside}))
    first, *others = layouts
    return dataclasses.replace(first, others=tuple(others))


def beside_vision_tower(
    names: CheckpointMap,
    tower: TowerSpec,
    *,
    towers: tuple[str, ...] = ("vision_tower.vision_model", "vision_tower"),
    told_by: str = "post_layernorm.weight",
) -> CheckpointMap:
    """The map of a decoder beside a tower called `vision_tower` and its projector. transformers has
    left out a module around most towers since, and may write all inside `model`. What pools the
    tower's outputs is not used.

    Args:
      towers: the names that checkpoints have for the tower.
      told_by: a parameter that every such tower has.
    """
    layouts = []
    for its in _layouts(names):
        for before, decoder in (
            ("", {"model": "language_model.model", "lm_head": "language_model.lm_head"}),
            ("model.", {"model": "model.language_model"}),
        ):
            for vision in towers:
                inside = tower.names(CheckpointMap()).with_names(
                    vision_tower=before + vision,
                    multi_modal_projector=f"{before}multi_modal_projector",
                )
                layout = its.with_names(**decoder).ignoring(rf"{before}{vision}\.head\..*")
                told = (*layout.told_by, f"tower.vision_tower.{told_by}")
                layouts.append(dataclasses.replace(layout, parts={"tower": inside}, told_by=told))
    first, *others = layouts
    return dataclasses.replace(first, others=tuple(others))


def beside_embed_vision(names: CheckpointMap, tower: TowerSpec) -> CheckpointMap:
    """The map of Gemma 4's decoder beside the tower for images; that for sound is not loaded.
    Releases have all inside `model`; others have the decoder's parts as older models."""
    layouts = []
    for before, decoder in (
        ("model.", {"model": "model.language_model"}),
        ("", {"model": "language_model.model", "lm_head": "language_model.lm_head"}),
    ):
        modules = {name: before + name for name in ("vision_tower", "embed_vision")}
        inside = tower.names(CheckpointMap()).with_names(**modules)
        for its in _layouts(names):
            layout = its.with_names(**decoder).ignoring(rf"{before}(audio_\w+|embed_audio)\..*")
            layouts.append(dataclasses.replace(layout, parts={"tower": inside}))
    first, *others = layouts
    return dataclasses.replace(first, others=tuple(others))


def _layouts(names: CheckpointMap) -> list[CheckpointMap]:
    return [dataclasses.replace(its, others=()) for its in (names, *names.others)]
