"""Runs steps on devices: packs their inputs, dispatches them, brings results to the host."""
