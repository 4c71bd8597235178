import numpy as np
import pytest

from jaxllm.prompt_logprobs.host import PromptLogprobs
from jaxllm.scheduler.draft import StepDraft
from jaxllm.scheduler.features import Drafted
from jaxllm.scheduler.kv.tables import BlockTable
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.schedule import CARRIED_TOKEN, GO_ON


def placed(message, *, slot, computed, outputs=(), in_flight=0):
    request = Request(message)
    request.output_token_ids = list(outputs)
    request.num_tokens += len(outputs) + in_flight
    request.slot, request.num_computed_tokens = slot, computed
    return request


def build(*rows, features=()):
    draft = StepDraft(features)
    for request, num_tokens in rows:
        draft.add_row(request, num_tokens)
    return draft.build(7, draft.in_order())


def test_single_tokens_come_first(make_request):
    schedule = build(
        (placed(make_request("chunk", [1, 2, 3, 4, 5]), slot=0, computed=4), 3),
        (placed(make_request("known", [1, 2]), slot=1, computed=3, outputs=[8]), 1),
        (placed(make_request("carried", [1, 2]), slot=2, computed=3, in_flight=1), 1),
        (placed(make_request("prompt", [1, 6, 3]), slot=3, computed=2), 1),
    )
    assert schedule.step == 7
    assert schedule.num_decodes == 3
    assert schedule.slots.tolist() == [1, 2, 3, 0]
    assert schedule.token_ids.tolist() == [8, CARRIED_TOKEN, 6, 2, 3, 4]
    assert schedule.context_lens.tolist() == [3, 3, 2, 4]
    assert schedule.starts.tolist() == [GO_ON] * 4
    assert schedule.samples.tolist() == [True, True, False, False]
    assert schedule.slices == {}


def test_rows_with_the_fewest_tokens_come_first(make_request):
    schedule = build(
        (placed(make_request("long", [1] * 9), slot=0, computed=9), 9),
        (placed(make_request("short", [2, 3, 4, 5]), slot=1, computed=4), 3),
        (placed(make_request("shorter", [6, 7, 8]), slot=2, computed=3), 2),
        (placed(make_request("decode", [1, 9]), slot=3, computed=2), 1),
    )
    assert schedule.slots.tolist() == [3, 2, 1, 0]
    assert schedule.num_tokens.tolist() == [1, 2, 3, 9]
    assert schedule.context_lens.tolist() == [2, 3, 4, 9]
    assert schedule.token_ids.tolist() == [9, 7, 8, 3, 4, 5] + [1] * 9


def test_arrays_have_the_types_that_the_runner_expects(make_request):
    schedule = build((placed(make_request("a", [1, 2]), slot=0, computed=2), 2))
    for name in ("slots", "num_tokens", "context_lens", "starts", "token_ids"):
        assert getattr(schedule, name).dtype == np.int32, name
    assert schedule.samples.dtype == np.bool_
    assert schedule.block_updates.shape == (0, 4)
    assert schedule.block_updates.dtype == np.int32


def test_block_updates_name_group_slot_index_and_block(make_request):
    draft = StepDraft()
    request = placed(make_request("a", 6), slot=2, computed=6)
    request.tables = BlockTable(0, [5, 9]), BlockTable(1, [8])
    draft.admit(request, 4)
    grown = placed(make_request("b", 6), slot=1, computed=6)
    grown.tables = BlockTable(0, [3, 4, 7]), BlockTable(0, [1, 2])
    for table in grown.tables:
        table.num_sent = 2
    draft.add_blocks(grown)
    draft.add_row(request, 2)
    draft.add_row(grown, 1)
    schedule = draft.build(0, draft.in_order())
    of_admitted, of_grown = [[0, 2, 0, 5], [0, 2, 1, 9], [1, 2, 1, 8]], [[0, 1, 2, 7]]
    assert sorted(schedule.block_updates.tolist()) == sorted(of_admitted + of_grown)
    assert schedule.slots.tolist() == [1, 2]
    assert schedule.starts.tolist() == [GO_ON, 4]


def test_logprobs_are_wanted_only_by_rows_that_sample(make_request):
    message = make_request("a", 6, logprobs=1)
    assert not build((placed(message, slot=0, computed=4), 4)).wants_logprobs
    assert build((placed(message, slot=0, computed=6), 6)).wants_logprobs


@pytest.mark.parametrize(("count", "wants_logits"), [(20, False), (21, True)])
def test_logits_are_wanted_for_more_logprobs_than_a_step_computes(
    make_request, count, wants_logits
):
    of_outputs = make_request("a", 6, logprobs=count)
    assert not build((placed(of_outputs, slot=0, computed=4), 4)).wants_logits
    assert build((placed(of_outputs, slot=0, computed=6), 6)).wants_logits == wants_logits


class Halving:
    """A feature that some rows use; its slice says which."""

    name = "halving"

    def __init__(self, *, needs_mixed=False, wants_logits=False):
        self.says = needs_mixed, wants_logits

    def draft(self, rows, num_tokens):
        using = [row for row, request in enumerate(rows) if request.priority]
        if not using:
            return None
        return Drafted({"rows": np.array(using), "tokens": num_tokens[using]}, *self.says)


def test_a_slice_is_there_if_a_row_uses_its_feature(make_request):
    features = [Halving(), PromptLogprobs()]
    one = (placed(make_request("a", 6), slot=0, computed=6), 6)
    assert build(one, features=features).slices == {}
    other = (placed(make_request("b", 6, priority=1), slot=1, computed=4), 3)
    schedule = build(one, other, features=features)
    assert list(schedule.slices) == ["halving"]
    assert schedule.slices["halving"]["rows"].tolist() == [0]
    assert schedule.slices["halving"]["tokens"].tolist() == [3]


@pytest.mark.parametrize("needs_mixed", [False, True])
@pytest.mark.parametrize("wants_logits", [False, True])
def test_a_slice_says_what_its_step_needs(make_request, needs_mixed, wants_logits):
    features = [Halving(needs_mixed=needs_mixed, wants_logits=wants_logits)]
    decode = (placed(make_request("a", 6, priority=1), slot=0, computed=6), 1)
    schedule = build(decode, features=features)
    assert schedule.decode_only is not needs_mixed
    assert schedule.wants_logits is wants_logits
    chunk = (placed(make_request("b", 6), slot=1, computed=6), 6)
    assert not build(decode, chunk, features=features).decode_only
