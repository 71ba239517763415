"""A user's own arguments for an engine, checked before they are passed on."""

import difflib
from collections.abc import Collection, Mapping


def wrong_arguments(
    given: Mapping[str, object],
    known: Collection[str],
    *,
    section: str,
    engine: str,
    own_fields: Mapping[str, str],
    refused: Mapping[str, str],
) -> list[str]:
    """One sentence for each argument that cannot be passed on, with the nearest that can.

    section: of the config, such as vllm. own_fields: argument -> setting of ours that stands for it. refused: argument
    -> what is to be said of it.
    """
    mistakes = []
    for name in given:
        if name in own_fields:
            mistakes.append(f"{section}.engine_args.{name}: say it as rollout.{own_fields[name]}")
        elif name in refused:
            mistakes.append(f"{section}.engine_args.{name} {refused[name]}")
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            mistakes.append(f"{section}.engine_args.{name}: this {engine} has no such argument{hint}")
    return mistakes
