"""Runs steps on devices: packs their inputs, dispatches them, copies results to the host."""
