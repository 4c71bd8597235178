"""Requests with adapters: each runs with its own in its slot, nobody waits without need, and nobody
for ever."""

import itertools

import numpy as np
import pytest

from jaxllm.lora.adapter_file import content_of
from jaxllm.lora.host import MAX_OVERTAKING, Adapters
from jaxllm.lora.request import Adapter
from jaxllm.lora.shelf import HostShelf
from jaxllm.messages import FinishReason
from jaxllm.scheduler.schedule import NO_ADAPTER
from tests.adapters import LIMITS, write


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    made = []
    for number in range(1, 6):
        path = write(tmp_path_factory.mktemp("adapter"), {"lora_alpha": number})
        made.append(Adapter(f"adapter{number}", number, str(path), content_of(path)))
    return made


class Slots:
    """What is in the slots of a device, and whether every row that runs finds its adapter there."""

    def __init__(self, engine, shelf, num_slots):
        self.engine = engine
        self.shelf = shelf
        self.slots = [None] * num_slots
        self.of_rows = {}  # adapter slots by the slots of requests

    def step(self, **how):
        schedule = self.engine.step(**how)
        if schedule is None:
            return
        for slot, content in schedule.adapter_writes:
            self.slots[slot] = self.shelf.arrays(content)
        for admission in schedule.admissions:
            self.of_rows[admission.slot] = admission.adapter
        for request in self.engine.scheduler._places.running:
            slot = self.of_rows[request.slot]
            if request.adapter is None:
                assert slot == NO_ADAPTER
            else:
                # The factor in B, by which these adapters differ.
                assert self.slots[slot] == pytest.approx(request.adapter.number)

    def drain(self):
        for _ in range(10_000):
            if not self.engine.scheduler.has_unfinished_requests() and not self.engine.in_flight:
                return
            self.step()
        raise AssertionError("requests are left")


@pytest.fixture
def make(make_engine):
    shelves = []

    def make(num_slots=2, num_kept=2, **options):
        reference = []

        def lay_out(adapter):
            b = next(iter(adapter.values())).b[0, 0]
            reference.append(b)
            return b / unit

        limits = type(LIMITS)(num_slots, LIMITS.max_lora_rank, LIMITS.dtype, LIMITS.layers)
        shelf = HostShelf(limits, lay_out)
        shelves.append(shelf)
        gate = Adapters(shelf, num_slots=num_slots, num_kept=num_kept)
        engine = make_engine(gate=gate, **options)
        return engine, gate, Slots(engine, shelf, num_slots)

    unit = np.random.default_rng(0)
    unit.normal(size=(2, 6))
    unit = unit.normal(size=(4, 2)).astype(np.float32)[0, 0] / 2  # B of the first layer; r is 2
    yield make
    for shelf in shelves:
        shelf.close()


def test_others_overtake_a_request_whose_adapter_has_no_slot(make, make_request, adapters):
    engine, _, slots = make(num_slots=1, max_num_seqs=2)
    for name, adapter, tokens in (("a", adapters[0], 20), ("b", adapters[1], 2), ("c", None, 2)):
        engine.add(make_request(name, [1, 2, 3], tokens, adapter=adapter))
    slots.drain()
    assert [done.request.request_id for done in engine.done] == ["c", "a", "b"]


def test_only_so_many_overtake_it(make, make_request, adapters):
    """Two chains of requests keep the slot of one adapter busy without a pause."""
    engine, _, slots = make(num_slots=1, max_num_seqs=2)
    ids = itertools.count()
    # The host has read both, so that the one that waits waits for a slot from the start.
    for adapter in adapters[:2]:
        engine.add(make_request(adapter.name, [1, 2, 3], 1, adapter=adapter))
    slots.drain()

    def more():
        number = next(ids)
        tokens = 4 + 3 * (number % 2)  # so that they do not end together
        engine.add(make_request(f"a{number}", [1, 2, 3], tokens, adapter=adapters[0]))

    for _ in range(4):
        more()
    slots.step()
    waits = engine.add(make_request("b", [1, 2, 3], 3, adapter=adapters[1]))
    for _ in range(10 * MAX_OVERTAKING):
        while engine.scheduler.num_waiting < 4:
            more()
        slots.step()
        if waits.finish_reason is not None:
            break
    overtaken = [done for done in engine.done if done.request.request_id[1:].isdigit()]
    assert waits.finish_reason is FinishReason.LENGTH
    assert MAX_OVERTAKING <= len(overtaken) <= MAX_OVERTAKING + 8
    slots.drain()


def test_what_is_aborted_aside_leaves_nothing_behind(make, make_request, adapters):
    engine, gate, slots = make(num_slots=1)
    for name, adapter in zip("abc", adapters, strict=False):
        engine.add(make_request(name, [1, 2, 3], 12, adapter=adapter))
    for _ in range(3):
        slots.step()
    assert engine.scheduler.num_running == 1
    engine.abort("b")
    slots.drain()
    engine.drain()
    assert {one.finish_reason for one in engine.done} == {FinishReason.LENGTH, FinishReason.ABORT}


def test_the_host_keeps_those_used_last_and_the_pinned(make, make_request, adapters):
    engine, gate, slots = make(num_slots=1, num_kept=2)
    for number, adapter in enumerate(adapters):
        engine.add(make_request(str(number), [1, 2, 3], 2, adapter=adapter))
        slots.drain()
        if number == 0:
            assert gate.pin(1)
    assert gate.numbers() == {1, 5}


def test_adapters_are_told_by_what_their_requests_do(make, make_request, adapters):
    engine, gate, slots = make(num_slots=1)
    for name, adapter in zip("abc", [*adapters[:2], None], strict=True):
        engine.add(make_request(name, [1, 2, 3], 12, adapter=adapter))
    while not gate.names()[0]:  # it is read by a thread
        slots.step()
    assert gate.names() == (["adapter1"], ["adapter2"])
    slots.drain()
    assert gate.names() == ([], [])


def test_one_that_cannot_be_read_ends_its_requests(make, make_request, adapters):
    engine, gate, slots = make()
    other = Adapter("other", 9, adapters[0].path, "0" * 64)
    engine.add(make_request("a", [1, 2, 3], 4, adapter=other))
    slots.step()
    (failed,) = engine.scheduler.take_failed()
    assert failed.finish_reason is FinishReason.ERROR
    assert "have changed since they were checked" in failed.error
    assert gate.numbers() == set()


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_finds_its_adapters_in_their_slots(make, make_request, adapters, seed):
    rng = np.random.default_rng(seed)
    engine, _, slots = make(num_slots=2, num_kept=2, num_blocks=20, failure_loses_cache=True)
    for number in range(60):
        adapter = rng.choice([None, *adapters[: 2 + seed]])
        length, tokens = int(rng.integers(1, 30)), int(rng.integers(1, 20))
        engine.add(make_request(str(number), list(range(length)), tokens, adapter=adapter))
        for _ in range(rng.integers(0, 3)):
            slots.step(fails=rng.random() < 0.02)
        if rng.random() < 0.1:
            engine.abort(str(rng.integers(0, number + 1)))
    slots.drain()
    engine.drain()
    assert len(engine.done) == 60
