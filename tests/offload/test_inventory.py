"""What is where on the host: a place that has passed on is for nothing that comes late."""

from jaxllm.offload.inventory import Inventory


def test_a_place_passes_on():
    its = Inventory()
    its.await_content(0, 3, number=1)
    assert its.awaits(0, 3, 1) and its.find(0, b"a") is None
    its.put(0, 3, b"a")
    assert its.find(0, b"a") == 3 and its.find(1, b"a") is None
    its.await_content(0, 3, number=2)
    assert not its.awaits(0, 3, 1) and its.awaits(0, 3, 2)
    assert its.find(0, b"a") is None
    its.put(0, 3, b"b")
    assert its.find(0, b"b") == 3


def test_a_content_may_be_at_another_place_by_then():
    its = Inventory()
    for place, number in ((1, 1), (2, 2)):
        its.await_content(0, place, number)
        its.put(0, place, b"a")
    its.await_content(0, 1, number=3)
    assert its.find(0, b"a") == 2


def test_what_is_forgotten_is_not_found():
    its = Inventory()
    for place, content in enumerate((b"a", b"b", b"c")):
        its.await_content(0, place, place)
        its.put(0, place, content)
    its.forget(0, b"b")
    assert [its.find(0, one) for one in (b"a", b"b", b"c")] == [0, None, 2]
    its.forget_all()
    assert its.find(0, b"a") is its.find(0, b"c") is None
