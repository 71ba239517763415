"""Bare baselines: the engine or the wire alone, each in a process of its own that is gone when the next part begins."""
