"""A load of a place waits for the thread that fills it."""

import threading

import pytest

from jaxllm.offload.filling import Filling


def waits(wait):
    """Start to wait in a thread; return it when it has had time to go on."""
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.05)
    return thread


def test_it_waits_for_the_last_that_fills_a_place():
    filling = Filling()
    filling.await_places([(0, 1)])  # nothing fills it
    filling.begin([(0, 1)], [])
    filling.begin([(0, 1), (0, 2)], [])
    filling.begin([(0, 3)], [])
    thread = waits(lambda: filling.await_places([(0, 1)]))
    filling.end(1, [])
    thread.join(0.05)
    assert thread.is_alive()
    filling.end(2, [])
    thread.join(60)
    assert not thread.is_alive()


def test_a_place_that_could_not_be_filled_is_not_loaded():
    filling = Filling()
    filling.begin([(0, 1), (0, 2)], [])
    filling.end(2, [(0, 1)])
    filling.await_places([(0, 2)])
    with pytest.raises(RuntimeError, match=r"\(0, 1\)"):
        filling.await_places([(0, 2), (0, 1)])
    filling.begin([(0, 1)], [])
    filling.end(1, [])
    filling.await_places([(0, 1)])


def test_a_place_that_another_engine_fills_is_not_waited_for():
    filling = Filling()
    filling.begin([(0, 1)], [])
    filling.end(1, [(0, 1)])
    filling.begin([], [(0, 1)])
    filling.await_places([(0, 1)])


def test_it_waits_until_few_are_ahead():
    filling = Filling()
    filling.begin([(0, 1), (0, 2)], [])
    filling.begin([(0, 3)], [])
    filling.await_at_most(3)
    thread = waits(lambda: filling.await_at_most(1))
    assert thread.is_alive()
    filling.end(2, [])
    thread.join(60)
    assert not thread.is_alive()
