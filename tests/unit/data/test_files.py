"""Parquet and JSONL of the user's own: the layouts that are read, and what is refused where and why."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from rollout.datasets import DataConfig, LoadReport, check_share, load_rows
from rollout.datasets.files import file_rows

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}


def test_verls_layout_is_read_from_jsonl_and_parquet_alike(tmp_path: Path) -> None:
    lines = _jsonl(tmp_path / "rows.jsonl", [VERL])
    parquet.write_table(pyarrow.Table.from_pylist([VERL]), tmp_path / "rows.parquet")
    first, second = file_rows([lines]).rows[0], file_rows([tmp_path / "rows.parquet"]).rows[0]
    assert first == second
    assert first.prompt_id == "rows/1"
    assert first.messages == (("system", "Be brief."), ("user", "1+1?")) and first.text is None
    assert (first.ground_truth, first.data_source) == ("2", "openai/gsm8k")
    assert (first.extra["index"], first.extra["split"], first.extra["ability"]) == ("7", "train", "math")


@pytest.mark.parametrize(
    ("record", "ground_truth"),
    [
        ({"prompt": "1+1?", "ground_truth": "2"}, "2"),
        ({"prompt": "1+1?", "answer": 2}, "2"),
        ({"prompt": "1+1?", "answer": 2.5}, "2.5"),
        ({"prompt": "1+1?", "response": "two", "reward": 0.5}, "two"),
        ({"prompt": "1+1?", "chosen": "2", "rejected": "3"}, "2"),
        ({"prompt": "two\nlines", "answer": "a\nb"}, "a\nb"),
    ],
)
def test_the_simple_layouts_are_read(tmp_path: Path, record: dict[str, Any], ground_truth: str) -> None:
    (row,) = file_rows([_jsonl(tmp_path / "mine.jsonl", [record])]).rows
    assert (row.text, row.messages, row.data_source) == (record["prompt"], None, "mine")
    assert row.ground_truth == ground_truth


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"not json at all", "not JSON"),
        (b"", "empty line"),
        (b"[1]", "wrong type: the line is a JSON list"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": "caf\xe9", "answer": "1"}', "not UTF-8"),
        (b'{"prompt": "\\ud800", "answer": "1"}', "not UTF-8"),
        (b'{"answer": "1"}', "no prompt"),
        (b'{"question": "1+1?", "answer": "1"}', "type gsm8k"),
        (b'{"prompt": "  ", "answer": "1"}', "empty prompt"),
        (b'{"prompt": [], "answer": "1"}', "empty prompt"),
        (b'{"prompt": ["a", "list"], "answer": "1"}', "wrong type: a message of the prompt is text"),
        (b'{"prompt": 3, "answer": "1"}', "wrong type: prompt is a number"),
        (b'{"prompt": [{"role": "user", "content": null}], "answer": "1"}', "wrong type: prompt is null"),
        (b'{"prompt": "a\\tb", "answer": "1"}', "control character '\\t' in prompt, at character 1"),
        (b'{"prompt": "a", "answer": "\\u0000"}', "control character '\\x00' in answer"),
        (b'{"prompt": "a"}', "missing ground truth"),
        (b'{"prompt": "a", "answer": null}', "missing ground truth"),
        (b'{"prompt": "a", "answer": true}', "wrong type: answer is a boolean"),
        (b'{"prompt": "a", "response": "b"}', "missing reward"),
        (b'{"prompt": "a", "response": "b", "Reward": 1.0}', "missing reward (there is 'Reward')"),
        (b'{"prompt": "a", "response": "b", "reward": "4.2"}', "wrong type: reward is text"),
        (b'{"prompt": "a", "response": "b", "reward": null}', "wrong type: reward is null"),
        (b'{"prompt": "a", "response": "b", "reward": NaN}', "reward is nan"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_and_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n' + line + b'\n{"prompt": "b", "answer": "2"}\n')
    report = file_rows([path])
    assert [row.prompt_id for row in report.rows] == ["bad/1", "bad/3"]
    (reject,) = report.rejects
    assert (reject.path, reject.line) == (str(path), 2)
    assert reason in reject.reason


def test_a_byte_order_mark_is_no_reason_to_refuse_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n')
    assert len(file_rows([path]).rows) == 1


def test_control_characters_can_be_allowed(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "tabs.jsonl", [{"prompt": "a\tb", "answer": "1"}])
    assert not file_rows([path]).rows
    assert file_rows([path], allowed_control_characters="\n\t").rows[0].text == "a\tb"


def test_a_bad_parquet_row_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    broken = pyarrow.array([b"a", b"caf\xe9", b"", None], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"prompt": broken, "answer": ["1", "2", "3", "4"]}), path)
    report = file_rows([path])
    assert [row.text for row in report.rows] == ["a"]
    assert [reject.line for reject in report.rejects] == [2, 3, 4]
    assert [reject.reason.split(" (")[0] for reject in report.rejects] == ["not UTF-8", "empty prompt", "no prompt"]


def test_files_of_one_name_keep_their_prompts_apart(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "rows.jsonl" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        _jsonl(path, [{"prompt": "a", "answer": "1"}])
    assert [row.prompt_id for row in file_rows(paths).rows] == ["rows.1/1", "rows.2/1"]


def test_the_share_of_rejects_is_checked_and_the_first_ones_are_named(tmp_path: Path) -> None:
    good = [{"prompt": str(number), "answer": "1"} for number in range(1, 5)]
    path = _jsonl(tmp_path / "rows.jsonl", [*good, {"prompt": "a"}])
    report = file_rows([path])
    assert report.reject_share == 0.2
    check_share(report, 0.2)
    with pytest.raises(ValueError, match=r"1 of 5 rows cannot be used \(20\.00%, allowed 1\.00%\)") as caught:
        load_rows(DataConfig(type="file", path=str(path)))
    assert f"{path}:5: missing ground truth" in str(caught.value)


def test_a_source_without_a_good_row_is_an_error_at_any_share() -> None:
    with pytest.raises(ValueError, match="0 of 0 rows"):
        check_share(LoadReport(rows=()), 1.0)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot read {tmp_path / name}"):
        file_rows([tmp_path / name])


def test_a_broken_parquet_and_an_unknown_suffix_are_named(tmp_path: Path) -> None:
    for name, reason in {"broken.parquet": "as parquet", "rows.csv": r"must end in \.parquet"}.items():
        (tmp_path / name).write_bytes(b"PAR1 no PAR1")
        with pytest.raises(ValueError, match=reason) as caught:
            file_rows([tmp_path / name])
        assert str(tmp_path / name) in str(caught.value)


def test_the_limit_keeps_the_first_rows(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "rows.jsonl", [{"prompt": str(number), "answer": "1"} for number in range(9)])
    rows = load_rows(DataConfig(type="file", path=(str(path),), limit=2)).rows
    assert [row.text for row in rows] == ["0", "1"]


@pytest.mark.parametrize(
    "mistake",
    [{"type": "file"}, {"type": "gsm8k"}, {"type": "arithmetic", "path": "x"}, {"pathe": "x"}, {"operators": "/"}],
)
def test_a_mistake_in_the_config_is_an_error_before_anything_is_read(mistake: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        DataConfig.model_validate(mistake)


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
