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


def beside_visual(names: CheckpointMap, tower: TowerSpec | None) -> CheckpointMap:
    """The map of a decoder of Qwen's, whose tower is called `visual`; None: it is not loaded."""
    layouts = []
    for its in _layouts(names):
        # As the releases of Qwen2.5-VL have it, then as those of Qwen3-VL do.
        for decoder, visual in (("model", "visual"), ("model.language_model", "model.visual")):
            layout = its.with_names(model=decoder)
            if tower is None:
                layouts.append(layout.ignoring(r"(model\.)?visual\..*"))
            else:
                inside = tower.names(CheckpointMap()).with_names(visual=visual)
                layouts.append(dataclasses.replace(layout, parts={"tower": inside}))
    first, *others = layouts
    return dataclasses.replace(first, others=tuple(others))


def _layouts(names: CheckpointMap) -> list[CheckpointMap]:
    return [dataclasses.replace(its, others=()) for its in (names, *names.others)]
