"""Sources of prompts: one file per source, rows in, checked prompts out."""

from dataclasses import replace

from rollout.datasets.arithmetic import arithmetic_rows
from rollout.datasets.config import DataConfig
from rollout.datasets.files import check_share, file_rows
from rollout.datasets.gsm8k import gsm8k_rows
from rollout.datasets.random import random_rows
from rollout.datasets.row import LoadReport, PromptRow, Reject
from rollout.datasets.supervised import supervised_rows, with_responses

__all__ = ["DataConfig", "LoadReport", "PromptRow", "Reject", "check_share", "load_rows"]


def load_rows(source: DataConfig, *, responses: bool = False) -> LoadReport:
    """The prompts of a source with the rows that were refused; with `responses` every row has one.

    Raises ValueError when a file is missing, too many rows are refused (`max_reject_share`) or none is left.
    """
    report = _load_supervised(source) if responses else _load(source)
    check_share(report, source.max_reject_share)
    return replace(report, rows=report.rows[: source.limit])


def _load_supervised(source: DataConfig) -> LoadReport:
    report = supervised_rows(source) if source.type == "file" else _load(source)
    return with_responses(report, path=source.paths[0] if source.paths else source.type)


def _load(source: DataConfig) -> LoadReport:
    if source.type == "arithmetic":
        rows = arithmetic_rows(
            size=source.size, digits=source.digits, operators=source.operators, split=source.split, seed=source.seed
        )
        return LoadReport(rows=rows)
    if source.type == "random":
        return LoadReport(
            rows=random_rows(
                size=source.size,
                prompt_tokens=source.prompt_tokens,
                words=source.words,
                response_mean=source.response_mean,
                response_sigma=source.response_sigma,
                response_min=source.response_min,
                response_max=source.response_max,
                seed=source.seed,
            )
        )
    allowed = source.allowed_control_characters
    if source.type == "gsm8k":
        return gsm8k_rows(source.paths[0], split=source.split, allowed_control_characters=allowed)
    return file_rows(source.paths, allowed_control_characters=allowed)
