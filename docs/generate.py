"""Write docs/configuration.md from the config schemas, or check that it has not drifted.

python docs/generate.py           write
python docs/generate.py --check   exit 1 where the page is not what the schemas say
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.config import Config
from services.supervised.config import SftLaunch, SftSection
from trainer import config as trainer
from trainer.configs.kl import KL_ESTIMATORS
from trainer.configs.update import AGGREGATIONS

PAGE = Path(__file__).resolve().parent / "configuration.md"
INTRO = """# Configuration

<!-- Written by docs/generate.py from the schemas. Change those. -->

A recipe is a YAML file with these sections. `offbeat train RECIPE a.b=c` sets single values, `offbeat check RECIPE`
tells every mistake with its line, and `offbeat train RECIPE --print-config` prints what holds.

The start model and the temperature are said once: `model` (or `tiny`) stands for `rollout.model` and `trainer.model`,
`rollout.sampling.temperature` for `trainer.algorithm.temperature`, and `rollout.sampling.max_tokens` for
`trainer.algorithm.overlong.limit`.
"""
SUPERVISED = """
# Supervised training

The recipe of `offbeat sft` has `model` or `tiny`, `run` (`name` and `folder`), `data` and `trainer` as above, without
`trainer.algorithm` and `trainer.critic`, and these two sections. `sft.num_steps` stands for
`trainer.optimizer.total_steps` where a schedule needs it.
"""
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
NAMES = {"string": "text", "number": "number", "integer": "integer", "boolean": "true or false", "null": "null"}
# Names that a validator checks, so that the JSON schema does not list them.
CHOICES = {
    "adv_estimator": trainer.ADVANTAGE_ESTIMATORS,
    "loss": trainer.POLICY_LOSSES,
    "loss_aggregation": AGGREGATIONS,
    "kl_estimator": KL_ESTIMATORS,
    "attn_implementation": trainer.ATTENTION_IMPLEMENTATIONS,
}
Schema = dict[str, Any]


def main() -> int:
    """Write or compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 where the page has drifted")
    page = "".join(configuration())
    if not parser.parse_args().check:
        PAGE.write_text(page)
    elif not PAGE.is_file() or PAGE.read_text() != page:
        print("docs/configuration.md has drifted from the schemas: run python docs/generate.py")
        return 1
    return 0


def configuration() -> Iterator[str]:
    """The whole page, part by part."""
    schema = Config.model_json_schema()
    yield INTRO
    yield from section("", schema, schema["$defs"])
    yield SUPERVISED
    for key, own in (("sft", SftSection), ("launch", SftLaunch)):
        inner = own.model_json_schema()
        yield from section(key, inner, inner.get("$defs", {}))


def section(path: str, schema: Schema, definitions: dict[str, Schema]) -> Iterator[str]:
    """A table of one section's keys, then the sections inside it."""
    if path:
        yield f"\n## {path}\n\n{described(schema)}\n"
    yield "\n| key | type | default | meaning |\n|---|---|---|---|\n"
    inner: list[tuple[str, Schema]] = []
    for key, field in schema["properties"].items():
        held = held_section(field, definitions)
        if held is not None:
            inner.append((".".join(filter(None, [path, key])) + "[]" * ("items" in field), held))
        yield row(key, field, held, required=key in schema.get("required", []))
    for inner_path, inner_schema in inner:
        yield from section(inner_path, inner_schema, definitions)


def held_section(field: Schema, definitions: dict[str, Schema]) -> Schema | None:
    """The section that a field holds, alone, in a list or as one of several things."""
    options = [field, field.get("items", {}), *field.get("anyOf", [])]
    names = [str(option["$ref"]).rpartition("/")[2] for option in options if "$ref" in option]
    return definitions[names[0]] if names else None


def row(key: str, field: Schema, held: Schema | None, *, required: bool) -> str:
    default = "" if held is not None else code(field.get("default", {}))
    choices = {"enum": CHOICES[key]} if key in CHOICES else {}
    cells = (
        f"`{key}`",
        kind(field | choices),
        "required" if required else default,
        described(field) or described(held or {}),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def described(schema: Schema) -> str:
    return " ".join(str(schema.get("description", "")).split()).replace("<", "&lt;")


def code(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def kind(field: Schema) -> str:
    """What may stand there, in words."""
    if "$ref" in field:
        return "section"
    if "anyOf" in field:
        return " or ".join(kind(option) for option in field["anyOf"])
    if "enum" in field:
        return ", ".join(code(value) for value in field["enum"])
    if field.get("type") == "array":
        parts = field.get("prefixItems")
        return f"[{', '.join(map(kind, parts))}]" if parts else f"list of {kind(field['items'])}"
    return scalar(field)


def scalar(field: Schema) -> str:
    bounds = [f"{sign} {field[bound]}" for bound, sign in BOUNDS.items() if bound in field]
    pattern = [f"matching `{field['pattern']}`"] if "pattern" in field else []
    return f"{NAMES.get(field['type'], 'keys and values')} {', '.join([*bounds, *pattern])}".strip()


if __name__ == "__main__":
    sys.exit(main())
