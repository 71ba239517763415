"""Models that score each other's tokens have to mean the same by them."""

from __future__ import annotations

import logging

from services.errors import OffbeatError

logger = logging.getLogger(__name__)


def check_same_tokens(reference: str, start: str) -> None:
    """OffbeatError where the tokenizers of two models number tokens otherwise; a model without one is not compared."""
    from transformers import AutoTokenizer

    try:
        ours, theirs = (AutoTokenizer.from_pretrained(model).get_vocab() for model in (start, reference))
    except (OSError, ValueError) as error:
        logger.warning("tokenizers were not compared", extra={"facts": {"why": error}})
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        first = differing[0]
        raise OffbeatError(
            f"reference.model {reference} has another tokenizer than the start model {start}: {len(differing)} tokens"
            f" differ, {first!r} is {theirs.get(first)} there and {ours.get(first)} here"
        )
