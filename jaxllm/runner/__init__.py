"""Runs steps on devices: plans what will run, compiles it, packs inputs, dispatches."""
