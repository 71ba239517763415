"""Parquet and JSONL files of the user's own -> checked prompts; a row that cannot be used is located and counted."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollout.datasets.layouts import RowError, row_of
from rollout.datasets.row import LoadReport, PromptRow, Reject

Record = dict[str, Any]
JSONL_SUFFIXES = (".jsonl", ".ndjson")
SHOWN_REJECTS = 5


class ReadRecord(Protocol):
    """One record -> one checked row, or RowError."""

    def __call__(self, record: Record, *, prompt_id: str, data_source: str, allowed: str) -> PromptRow: ...


def file_rows(
    paths: Sequence[str | Path], *, allowed_control_characters: str = "\n", read: ReadRecord = row_of
) -> LoadReport:
    """All rows of the files in order; a prompt_id is "<file name without suffix>/<line or row, from 1>".

    A row without data_source gets the file's name for one. A bad row is a Reject, never an error; a file that is
    missing, cannot be read, or is neither parquet nor JSONL raises ValueError with its path.
    """
    rows: list[PromptRow] = []
    rejects: list[Reject] = []
    for path, name in _named(paths):
        for line, record in records(path):
            try:
                if isinstance(record, RowError):
                    raise record
                prompt_id = f"{name}/{line}"
                rows.append(read(record, prompt_id=prompt_id, data_source=name, allowed=allowed_control_characters))
            except RowError as reason:
                rejects.append(Reject(path=str(path), line=line, reason=str(reason)))
    return LoadReport(rows=tuple(rows), rejects=tuple(rejects))


def check_share(report: LoadReport, max_reject_share: float) -> None:
    """Raises ValueError, with the first rejects in its text, when a larger share (0 to 1) of the rows was refused.

    A source without a single good row is an error at any share.
    """
    if report.rows and report.reject_share <= max_reject_share:
        return
    total = len(report.rows) + len(report.rejects)
    shown = "".join(f"\n  {reject}" for reject in report.rejects[:SHOWN_REJECTS])
    more = len(report.rejects) - SHOWN_REJECTS
    tail = f"\n  and {more} more" if more > 0 else ""
    raise ValueError(
        f"{len(report.rejects)} of {total} rows cannot be used ({report.reject_share:.2%}, "
        f"allowed {max_reject_share:.2%}):{shown}{tail}"
    )


def records(path: Path) -> Iterator[tuple[int, Record | RowError]]:
    """(line or row from 1, the record or why there is none) for each row of one file. Raises ValueError."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet_records(path)
        elif path.suffix in JSONL_SUFFIXES:
            yield from _jsonl_records(path)
        else:
            raise ValueError(f"cannot tell what {path} is: its name must end in .parquet, {', '.join(JSONL_SUFFIXES)}")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def _named(paths: Sequence[str | Path]) -> list[tuple[Path, str]]:
    files = [Path(path).expanduser() for path in paths]
    stems = [file.stem for file in files]
    if len(set(stems)) == len(stems):
        return list(zip(files, stems, strict=True))
    return [(file, f"{file.stem}.{place}") for place, file in enumerate(files, start=1)]


def _jsonl_records(path: Path) -> Iterator[tuple[int, Record | RowError]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield number, _parse(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            except RowError as reason:
                yield number, reason


def _parse(line: bytes) -> Record:
    try:
        record = json.loads(line.decode())
        if b"\\u" in line:
            json.dumps(record, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise RowError("not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise RowError(f"not JSON: {error}" if line.strip() else "empty line") from error
    if not isinstance(record, dict):
        raise RowError(f"wrong type: the line is a JSON {type(record).__name__}, not an object")
    return record


def _parquet_records(path: Path) -> Iterator[tuple[int, Record | RowError]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in _pylist(batch):
                    number += 1
                    yield number, record
    except pyarrow.ArrowException as error:
        raise ValueError(f"cannot read {path} as parquet, at row {number + 1}: {error}") from error


def _pylist(batch: Any) -> list[Record | RowError]:
    """The rows of a batch as Python values; when one is not UTF-8, row by row so that only that one is refused."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [RowError("not UTF-8")]
        return [record for row in range(batch.num_rows) for record in _pylist(batch.slice(row, 1))]
