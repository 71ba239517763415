"""What the files of a checkpoint say, read the same way for every engine: end tokens, longest length."""

from collections.abc import Iterable

from transformers import GenerationConfig


def read_generation_config(path: str) -> GenerationConfig | None:
    """None where the checkpoint has none."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


def end_ids_of(sources: Iterable[object]) -> frozenset[int]:
    """Every end-of-sequence id that a config, a generation config or a tokenizer names."""
    ids: set[int] = set()
    for source in sources:
        named = getattr(source, "eos_token_id", None)
        ids.update([named] if isinstance(named, int) else named or ())
    return frozenset(ids)


def chosen_length(limit: int | None, *, asked: int | None) -> int:
    """The asked length, else the model's own; ValueError where neither is there or it is over the model's."""
    if asked is not None and limit is not None and asked > limit:
        raise ValueError(f"max_model_len {asked} is over the {limit} positions of the model")
    chosen = asked if asked is not None else limit
    if chosen is None:
        raise ValueError("the model names no longest length: set max_model_len")
    return chosen
