"""The small programs that write a part of the device state, beside the steps."""

import dataclasses

import jax

from jaxllm.prompt_embeds.device import write
from jaxllm.runner.state import DeviceState
from jaxllm.runner.step import update_block_tables
from jaxllm.sampling.slot_state import SlotRow
from jaxllm.sampling.slot_state import write_slot as write_row
from jaxllm.speculation.drafter import Drafter


def write_tables(state: DeviceState, updates: jax.Array) -> DeviceState:
    tables = update_block_tables(state.block_tables, updates)
    return dataclasses.replace(state, block_tables=tables)


def write_slot(state: DeviceState, slot: jax.Array, row: SlotRow) -> DeviceState:
    assert state.slots is not None
    return dataclasses.replace(state, slots=write_row(state.slots, slot, row))


def write_embeds(state: DeviceState, row: jax.Array, embeddings: jax.Array) -> DeviceState:
    assert state.given is not None
    return dataclasses.replace(state, given=write(state.given, row, embeddings))


def admit_drafts(
    drafter: Drafter, state: DeviceState, slot: jax.Array, tokens: jax.Array
) -> DeviceState:
    return dataclasses.replace(state, drafter=drafter.admit(state.drafter, slot, tokens))
