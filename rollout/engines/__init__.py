"""The engines by name; each is imported only when it is asked for."""

from importlib import import_module

ENGINES = {
    "hf": "rollout.engines.hf:HfEngine",
    "vllm": "rollout.engines.vllm:VllmEngine",
    "sglang": "rollout.engines.sglang:SglangEngine",
}


def load(name: str) -> type:
    """The engine class of this name (see rollout/engine.py for its face). ValueError if there is none."""
    if name not in ENGINES:
        raise ValueError(f"no engine named {name!r}; there are: {', '.join(ENGINES)}")
    module, _, attribute = ENGINES[name].partition(":")
    engine: type = getattr(import_module(module), attribute)
    return engine
