"""What every section of the settings is, and how a name that does not exist is answered. Imports pydantic only."""

import difflib
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Unknown fields are refused, values stay as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def one_of(kind: str, names: tuple[str, ...]) -> Callable[[str], str]:
    """A check that gives its value back, or raises ValueError with the nearest of `names` and all of them."""

    def check(value: str) -> str:
        if value in names:
            return value
        nearest = difflib.get_close_matches(value, names, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"unknown {kind} {value!r}; {hint}existing: {', '.join(names)}")

    return check
