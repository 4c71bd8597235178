"""The implementations of products with codes that a plan may use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxllm_kernels.coded import CodeForm
from jaxllm_kernels.dense.api import XLA_CODED, CodedMatmul, NoNeed
from jaxllm_kernels.experts.api import ExpertsOp
from jaxllm_kernels.experts.xla import XLA_EXPERTS

from jaxllm.errors import UnsupportedModelError
from jaxllm.logging import init_logger

logger = init_logger(__name__)
_Op = TypeVar("_Op", CodedMatmul, ExpertsOp)


@dataclass(frozen=True, kw_only=True)
class Products:
    """Implementations for layers and for experts, the fastest first. The last ones, XLA's, have
    products with every form."""

    linear: tuple[CodedMatmul, ...] = (XLA_CODED,)
    experts: tuple[ExpertsOp, ...] = (XLA_EXPERTS,)


def choose(
    ops: Sequence[_Op], forms: Sequence[CodeForm], shapes: Sequence[tuple[int, int]], name: str
) -> tuple[_Op, tuple[CodeForm, ...]]:
    """The first implementation for the weights of a layer, of these forms and shapes [out, in] on a
    device, and the forms in which it takes them."""
    for op in ops:
        try:
            held = (op.held(form, *shape) for form, shape in zip(forms, shapes, strict=True))
            return op, tuple(held)
        except NoNeed:
            continue
        except ValueError as error:
            if op == ops[-1]:
                raise UnsupportedModelError(f"{name}: {error}") from error
            _log_once(f"products with codes ({forms[0]}): not by {op.name!r}, since {error}")
    raise AssertionError("no implementation to choose from")


_logged: set[str] = set()


def _log_once(message: str) -> None:
    """Many layers have one form."""
    if message not in _logged:
        _logged.add(message)
        logger.warning(message)
