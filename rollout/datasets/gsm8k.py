"""GSM8K (grade school mathematics): its train.jsonl and test.jsonl -> parquet in verl's layout, or prompts at once.

A line holds `question` and `answer`; the answer ends in "#### N", and N without its commas is the ground truth.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rollout.datasets.arithmetic import Split
from rollout.datasets.files import file_rows, records
from rollout.datasets.layouts import RowError, row_of
from rollout.datasets.row import LoadReport, PromptRow, Reject

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS: tuple[Split, ...] = ("train", "test")
FINAL_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """What became of one split: rows written, rows refused, SHA-256 (hex) of the file read and of the one written."""

    rows: int
    rejects: tuple[Reject, ...]
    input: str
    input_sha256: str
    output: str
    output_sha256: str


def convert(source_dir: Path | str, out_dir: Path | str) -> dict[str, SplitReport]:
    """Write train.parquet, test.parquet and report.json to `out_dir`; the report comes back by split.

    Raises ValueError with the path when an input is missing or cannot be read.
    """
    source, out = Path(source_dir).expanduser(), Path(out_dir).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    reports = {split: _convert_split(source / f"{split}.jsonl", out / f"{split}.parquet", split) for split in SPLITS}
    text = json.dumps({split: asdict(report) for split, report in reports.items()}, indent=2)
    (out / "report.json").write_text(text + "\n", encoding="utf-8")
    return {str(split): report for split, report in reports.items()}


def gsm8k_rows(folder: Path | str, *, split: Split = "train", allowed_control_characters: str = "\n") -> LoadReport:
    """Prompts "gsm8k/<split>/<index from 0>" of the folder's <split>.parquet or, without one, <split>.jsonl."""
    base = Path(folder).expanduser()
    if (base / f"{split}.parquet").exists():
        report = file_rows([base / f"{split}.parquet"], allowed_control_characters=allowed_control_characters)
        return replace(report, rows=tuple(_with_index(row, split) for row in report.rows))
    checked, rejects = _read(base / f"{split}.jsonl", split)
    rows: list[PromptRow] = []
    for line, record in checked:
        prompt_id = f"gsm8k/{split}/{line - 1}"
        try:
            row = row_of(record, prompt_id=prompt_id, data_source=DATA_SOURCE, allowed=allowed_control_characters)
        except RowError as reason:
            rejects.append(Reject(path=str(base / f"{split}.jsonl"), line=line, reason=str(reason)))
        else:
            rows.append(_with_response(row))
    return LoadReport(rows=tuple(rows), rejects=tuple(rejects))


def verl_record(line: Mapping[str, Any], *, split: Split, index: int) -> dict[str, Any]:
    """One GSM8K line in verl's layout. Raises RowError when a field is not text or the answer has no "#### N"."""
    question, answer = line.get("question"), line.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise RowError("wrong type: question and answer must both be text")
    if not question.strip():
        raise RowError("empty prompt")
    final = FINAL_ANSWER.search(answer)
    if final is None:
        raise RowError('missing ground truth: the answer has no "#### N"')
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def _with_index(row: PromptRow, split: Split) -> PromptRow:
    return replace(_with_response(row), prompt_id=f"gsm8k/{split}/{row.extra.get('index', row.prompt_id)}")


def _with_response(row: PromptRow) -> PromptRow:
    """The whole answer, reasoning and all, as GSM8K has it."""
    return replace(row, response=row.extra.get("answer"))


def _read(path: Path, split: Split) -> tuple[list[tuple[int, dict[str, Any]]], list[Reject]]:
    """The lines of a file in verl's layout, each with its line number from 1, and the refused ones."""
    good: list[tuple[int, dict[str, Any]]] = []
    rejects: list[Reject] = []
    for line, record in records(path):
        try:
            if isinstance(record, RowError):
                raise record
            good.append((line, verl_record(record, split=split, index=line - 1)))
        except RowError as reason:
            rejects.append(Reject(path=str(path), line=line, reason=str(reason)))
    return good, rejects


def _convert_split(source: Path, target: Path, split: Split) -> SplitReport:
    good, rejects = _read(source, split)
    _write_parquet([record for _, record in good], target)
    return SplitReport(
        rows=len(good),
        rejects=tuple(rejects),
        input=source.name,
        input_sha256=_sha256(source),
        output=target.name,
        output_sha256=_sha256(target),
    )


def _write_parquet(rows: list[dict[str, Any]], target: Path) -> None:
    """Under a temporary name first, so that a broken write never stands under the real one."""
    import pyarrow
    from pyarrow import parquet

    text, number = pyarrow.string(), pyarrow.int64()
    message = pyarrow.struct([("content", text), ("role", text)])
    info = pyarrow.struct([("answer", text), ("index", number), ("question", text), ("split", text)])
    schema = pyarrow.schema(
        [
            ("data_source", text),
            ("prompt", pyarrow.list_(message)),
            ("ability", text),
            ("reward_model", pyarrow.struct([("ground_truth", text), ("style", text)])),
            ("extra_info", info),
        ]
    )
    partial = target.with_suffix(".parquet.partial")
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), partial)
    os.replace(partial, target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
