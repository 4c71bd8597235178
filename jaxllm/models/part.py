"""Cuts a model by its layers into parts that run one after the other."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """Consecutive layers of a model. The first part has the embedding, the last part the final
    norm and the head."""

    first_layer: int
    end_layer: int
    embeds: bool  # takes token ids; other parts take the hidden states of the previous part
    has_head: bool  # computes logits

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    @property
    def is_whole(self) -> bool:
        return self.embeds and self.has_head


def split_model(num_layers: int, num_parts: int) -> tuple[ModelPart, ...]:
    """Cut a model into parts whose numbers of layers differ by at most one.

    Left-over layers go to the middle parts first, then to the first part. The last part gets none,
    because it computes the head; the first part's embedding is only a lookup.
    """
    assert 1 <= num_parts <= num_layers, (num_parts, num_layers)
    size, left_over = divmod(num_layers, num_parts)
    sizes = [size] * num_parts
    for part in [*range(1, num_parts - 1), 0][:left_over]:
        sizes[part] += 1
    ends = [sum(sizes[: part + 1]) for part in range(num_parts)]
    return tuple(
        ModelPart(
            first_layer=end - size,
            end_layer=end,
            embeds=end == size,
            has_head=end == num_layers,
        )
        for end, size in zip(ends, sizes, strict=True)
    )
