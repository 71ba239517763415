"""What a push sends and what the engines hold: none of them casts, so it has to be the same dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.config import Config


def dtype_problem(held: Iterable[str | None], *, push: str, trainer: str) -> str:
    """Why these engines could take no push, and the cure; empty where they can. None: not known.

    push, trainer: the settings push.dtype and trainer.dtype.
    """
    kinds = sorted({one for one in held if one is not None})
    sent = trainer if push == "auto" else push
    if len(kinds) > 1:
        return (
            f"rollout servers hold {' and '.join(kinds)}, and a push sends one dtype: give all the same rollout.dtype"
        )
    if not kinds or kinds == [sent]:
        return ""
    return (
        f"rollout servers hold {kinds[0]} (rollout.dtype), a push would send {sent} (push.dtype={push},"
        f" trainer.dtype={trainer}), and engines do not cast: set push.dtype={kinds[0]}"
    )


def held_dtypes(config: Config, *, own: str | None = None) -> list[str | None]:
    """By each kind of rollout server. own: of the start model's files, which `auto` takes; None: not known."""
    dtypes = (config.rollout_of(member).dtype for member in config.fleet)
    return [own if dtype == "auto" else dtype for dtype in dtypes]


def check_sent(config: Config) -> None:
    """ValueError where the engines hold another dtype than a push would send; reads the start model's config.

    That of the trainer's copy: a rollout server whose config.json differs cannot join.
    """
    from transformers import AutoConfig

    from trainer.model.load import model_folder

    stored = getattr(AutoConfig.from_pretrained(model_folder(config.trainer.model)), "dtype", None)
    own = None if stored is None else str(stored).removeprefix("torch.")
    problem = dtype_problem(held_dtypes(config, own=own), push=config.push.dtype, trainer=config.trainer.dtype)
    if problem:
        raise ValueError(problem)
