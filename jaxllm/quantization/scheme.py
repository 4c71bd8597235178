"""Which layers of a model are stored in which form."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from jaxllm.errors import UnsupportedModelError
from jaxllm.quantization.form import Form
from jaxllm.quantization.products import Products


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a checkpoint, or the user, says about the weights of linear layers.

    Layers are known by the names of their modules in the checkpoint. A pattern is a regular
    expression that matches the beginning of a name.
    """

    method: str  # vLLM's name of it
    # Patterns of names -> the form of what they match. The first one that matches holds.
    forms: tuple[tuple[str, Form], ...]
    ignored: tuple[str, ...] = ()
    # The plan's choice.
    products: Products = Products()

    def form_of(self, modules: Collection[str]) -> Form | None:
        """The form of a layer that is fused of some modules; None: it has no codes."""
        forms = {self._form(module) for module in modules}
        if len(forms) > 1:
            raise UnsupportedModelError(
                f"quantization_config stores {' and '.join(sorted(modules))} in different forms; "
                "they are one matrix here, which has one form"
            )
        (form,) = forms
        return form

    def _form(self, module: str) -> Form | None:
        if any(re.match(pattern, module) for pattern in self.ignored):
            return None
        return next((form for pattern, form in self.forms if re.match(pattern, module)), None)

    def __str__(self) -> str:
        forms = dict.fromkeys(str(form) for _, form in self.forms)
        return f"{self.method} ({'; '.join(forms)})"
