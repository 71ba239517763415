"""The rows of a supervised run as tokens, in the order in which they are learned."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout.datasets import LoadReport, PromptRow, load_rows
from rollout.datasets.config import DataConfig
from rollout.datasets.files import SHOWN_REJECTS
from rollout.prompts import PromptStream, permutation
from rollout.tokens import PromptEncoder
from services.errors import ConfigError
from services.supervised.config import SftConfig
from trainer.model.load import model_folder
from trainer.supervised.batch import Example

logger = logging.getLogger(__name__)
HELD_OUT_EPOCH = -1
"""Number of the order by which held-out rows are drawn; those of training count from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRows:
    """What is learned, and what is held out."""

    stream: PromptStream
    examples: Mapping[str, Example]
    """By prompt_id."""
    held_out: Sequence[Example]
    fingerprint: str
    """Of the examples in the order of the source, and of how they are shuffled."""

    def at(self, position: int, size: int) -> list[Example]:
        """The next examples of the endless stream."""
        rows = (self.stream.at(place)[1] for place in range(position, position + size))
        return [self.examples[row.prompt_id] for row in rows]


def sft_rows(config: SftConfig) -> SftRows:
    """Reads and encodes all rows; ConfigError where the data cannot be used or nothing is short enough."""
    encode = PromptEncoder(str(model_folder(config.trainer.model)))
    rows, held_out = split_rows(config)
    kept = fitting(encode, rows, key="data", config=config)
    order = hashlib.sha256(f"{config.data.seed} {config.data.shuffle}".encode())
    for example in kept.values():
        order.update(example.key.encode() + example.prompt_ids.tobytes() + b"/" + example.response_ids.tobytes())
    stream = PromptStream(
        [row for row in rows if row.prompt_id in kept], seed=config.data.seed, shuffle=config.data.shuffle
    )
    judged = list(fitting(encode, held_out, key="sft.held_out", config=config).values()) if held_out else []
    return SftRows(stream=stream, examples=kept, held_out=judged, fingerprint=order.hexdigest())


def split_rows(config: SftConfig) -> tuple[Sequence[PromptRow], Sequence[PromptRow]]:
    """Rows to learn from and rows that are held out, where some are to be."""
    rows = checked_rows(config.data, "data")
    sft, apart = config.sft, config.held_out_data()
    if apart is not None:
        found = checked_rows(apart, "sft.held_out")
        return rows, found[: sft.num_held_out or None]
    count = round(sft.held_out_share * len(rows))
    order = permutation(len(rows), seed=config.data.seed, epoch=HELD_OUT_EPOCH)
    taken = set(order[:count])
    held_out = [rows[index] for index in order[:count][: sft.num_held_out or None]]
    return [row for index, row in enumerate(rows) if index not in taken], held_out if sft.evaluate_every else []


def check_data(config: SftConfig) -> None:
    """ConfigError where the data cannot be used, before anything is made."""
    apart = config.held_out_data()
    read(config.data, "data")
    if apart is not None:
        read(apart, "sft.held_out")


def read(data: DataConfig, key: str) -> LoadReport:
    """The rows of a source, each with a response; ConfigError names refused ones by file and line."""
    try:
        return load_rows(data, responses=True)
    except (ValueError, OSError) as error:
        raise ConfigError([f"{key}: {error}"]) from error


def checked_rows(data: DataConfig, key: str) -> Sequence[PromptRow]:
    """The same rows; those few that max_reject_share allows to be refused are told."""
    report = read(data, key)
    if report.rejects:
        tell_rejects(report, key)
    return report.rows


def tell_rejects(report: LoadReport, key: str) -> None:
    shown = "; ".join(map(str, report.rejects[:SHOWN_REJECTS]))
    logger.warning("rows were refused", extra={"facts": {"of": key, "rows": len(report.rejects), "first": shown}})


def fitting(encode: PromptEncoder, rows: Sequence[PromptRow], *, key: str, config: SftConfig) -> dict[str, Example]:
    """The rows as tokens, without those that are longer than max_length; ConfigError where none is left."""
    try:
        found = {row.prompt_id: example_of(row, encode) for row in rows}
    except ValueError as error:
        raise ConfigError([f"{key}: {error}"]) from error
    limit = config.sft.max_length
    kept = {name: example for name, example in found.items() if example.length <= limit}
    if not kept:
        raise ConfigError([f"{key}: each of {len(rows)} rows is longer than sft.max_length={limit} tokens"])
    if len(kept) < len(found):
        facts = {"of": key, "rows": len(found) - len(kept), "max_length": limit, "left": len(kept)}
        logger.warning("rows are too long and left out", extra={"facts": facts})
    return kept


def example_of(row: PromptRow, encode: PromptEncoder) -> Example:
    """The prompt as rollout servers encode it, and the response as they would have made it."""
    assert row.response is not None
    return Example(
        key=row.prompt_id,
        prompt_ids=encode(row.text or "", row.messages or ()),
        response_ids=encode.response(row.response),
    )
