"""What is where on the host: a place that has passed on is for nothing that comes late."""

import pytest

from jaxllm.offload.inventory import Inventory


def filled(*contents):
    """An inventory with these at places from 0 on."""
    its = Inventory()
    for place, content in enumerate(contents):
        its.await_content(0, place, place, content)
        its.put(0, place, place, content)
    return its


def test_a_place_passes_on():
    its = filled(b"x", b"y", b"z", b"a")
    assert its.find(0, b"a") == 3 and its.find(1, b"a") is None
    its.await_content(0, 3, 7, b"b")
    assert its.awaits(0, 3, 7, b"b") and its.find(0, b"a") is None
    for number, content in ((6, b"b"), (7, b"c")):  # too late, or of another content
        assert not its.awaits(0, 3, number, content)
        its.put(0, 3, number, content)
        assert its.find(0, content) is None
    its.put(0, 3, 7, b"b")
    assert its.find(0, b"b") == 3 and not its.awaits(0, 3, 7, b"b")


def test_a_content_may_be_at_another_place_by_then():
    its = filled(b"x", b"a", b"a")
    its.await_content(0, 1, 7, b"b")
    assert its.find(0, b"a") == 2


@pytest.mark.parametrize("forget", [lambda its: its.forget(0, b"b"), Inventory.forget_all])
def test_what_is_forgotten_is_not_found_even_if_it_comes(forget):
    its = filled(b"a", b"b", b"c")
    its.await_content(0, 3, 7, b"b")
    forget(its)
    its.put(0, 3, 7, b"b")
    assert its.find(0, b"b") is None and not its.awaits(0, 3, 7, b"b")
    assert its.find(0, b"a") == (None if forget is Inventory.forget_all else 0)
