"""The engine's real scheduler, cache and router with a model of step times, in simulated time."""
