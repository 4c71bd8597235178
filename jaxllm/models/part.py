"""How a model is cut into parts that run one after the other: by layers, and nothing else."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """Consecutive layers of a model, with the embedding before the first of all and the final norm
    and the head after the last of all."""

    first_layer: int
    end_layer: int
    embeds: bool  # takes token ids; other parts take the hidden states of the part before
    has_head: bool  # makes logits

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    @property
    def is_whole(self) -> bool:
        return self.embeds and self.has_head


def split_model(num_layers: int, num_parts: int) -> tuple[ModelPart, ...]:
    """Cut a model into parts whose numbers of layers differ by one at most.

    What is left over goes to those in the middle first, then to the first part, whose embedding
    is only looked up; the last one has the head to compute.
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
