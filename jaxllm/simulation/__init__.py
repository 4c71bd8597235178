"""The engine's true scheduler, cache and router against a model of its steps, in simulated time."""
