"""Which layers of a model are stored in which form."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxllm.errors import UnsupportedModelError
from jaxllm.quantization.form import Storage
from jaxllm.quantization.made import AtLoad
from jaxllm.quantization.products import Products


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a checkpoint, or the user, says about the weights of linear layers.

    Layers are known by the names of their modules in the checkpoint. A pattern is a regular
    expression that matches the beginning of a name.
    """

    method: str  # vLLM's name of it
    # Patterns of names -> how what they match is stored; None: as floats. The first one that
    # matches holds.
    storages: tuple[tuple[str, Storage | None], ...]
    ignored: tuple[str, ...] = ()
    # Whether groups with powers of two are held as they are, where a scale per output has the same
    # values, too.
    keeps_groups: bool = False
    # The plan's choice.
    products: Products = Products()

    def storage_of(self, modules: Sequence[tuple[str, ...]]) -> Storage | None:
        """How a layer that is fused of some modules is stored; None: as floats. A module may have
        several names, in different layouts of the same model."""
        storages = {self._storage(names) for names in modules}
        if len(storages) > 1:
            shown = " and ".join(sorted(names[0] for names in modules)[:4])
            raise UnsupportedModelError(
                f"quantization_config stores {shown} in different forms; "
                "they are one matrix here, which has one form"
            )
        (storage,) = storages
        return storage

    def _storage(self, names: tuple[str, ...]) -> Storage | None:
        def matches(pattern: str) -> bool:
            return any(re.match(pattern, name) for name in names)

        if any(map(matches, self.ignored)):
            return None
        return next((storage for pattern, storage in self.storages if matches(pattern)), None)

    @property
    def reads_codes(self) -> bool:
        """Whether the checkpoint has codes, which are not made of its weights."""
        return not all(isinstance(storage, AtLoad) for _, storage in self.storages)

    def keeping_groups(self) -> "Scheme":
        """The scheme whose weights are held in the groups that the checkpoint has."""
        return replace(self, keeps_groups=True)

    def __str__(self) -> str:
        forms = dict.fromkeys(str(its.form) for _, its in self.storages if its is not None)
        return f"{self.method} ({'; '.join(forms)})"
