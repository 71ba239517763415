"""GSM8K: from its JSONL to verl's parquet, and to prompts."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pyarrow import parquet

from rollout.datasets import DataConfig, load_rows
from rollout.datasets.gsm8k import convert, gsm8k_rows

CLIPS = {"question": "Natalia sold 48 clips, then half as many. How many?", "answer": "48/2 = 24\n48+24 = 72\n#### 72"}
COSTS = {"question": "How much?", "answer": "In all $1,234.\n#### 1,234"}
CONTENT = CLIPS["question"] + ' Let\'s think step by step and output the final answer after "####".'


def test_convert_writes_verls_layout(tmp_path: Path) -> None:
    source = _source(tmp_path, train=[CLIPS, COSTS], test=[COSTS])
    convert(source, tmp_path / "out")
    assert parquet.read_table(tmp_path / "out/train.parquet").to_pylist()[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": CONTENT}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0, "answer": CLIPS["answer"], "question": CLIPS["question"]},
    }


def test_the_report_counts_locates_and_hashes(tmp_path: Path) -> None:
    source = _source(tmp_path, train=[CLIPS, {"question": "no number?", "answer": "?"}, COSTS], test=[COSTS])
    convert(source, tmp_path / "out")
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert (report["train"]["rows"], report["test"]["rows"]) == (2, 1)
    (reject,) = report["train"]["rejects"]
    assert (reject["line"], reject["reason"]) == (2, 'missing ground truth: the answer has no "#### N"')
    assert report["train"]["input_sha256"] == hashlib.sha256((source / "train.jsonl").read_bytes()).hexdigest()
    written = (tmp_path / "out/train.parquet").read_bytes()
    assert report["train"]["output_sha256"] == hashlib.sha256(written).hexdigest()


def test_the_folder_gives_the_same_prompts_before_and_after_converting(tmp_path: Path) -> None:
    source = _source(tmp_path, train=[CLIPS, {"question": 1}, COSTS], test=[COSTS])
    convert(source, tmp_path / "out")
    before, after = gsm8k_rows(source).rows, gsm8k_rows(tmp_path / "out").rows
    assert before == after
    assert [row.prompt_id for row in before] == ["gsm8k/train/0", "gsm8k/train/2"]
    assert [row.ground_truth for row in before] == ["72", "1234"]
    assert before[0].messages == (("user", CONTENT),)
    assert before[0].extra["question"] == CLIPS["question"]


def test_the_test_split_is_chosen_by_the_config(tmp_path: Path) -> None:
    source = _source(tmp_path, train=[CLIPS], test=[COSTS])
    (row,) = load_rows(DataConfig(type="gsm8k", path=str(source), split="test")).rows
    assert (row.prompt_id, row.data_source) == ("gsm8k/test/0", "openai/gsm8k")


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*train\.jsonl: No such file"):
        convert(tmp_path, tmp_path / "out")


def _source(tmp_path: Path, **splits: Sequence[Mapping[str, object]]) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder
