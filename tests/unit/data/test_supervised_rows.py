"""Rows with responses: where a file keeps them, what is refused and where, and how they become tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rollout.datasets import DataConfig, load_rows
from rollout.tokens import PromptEncoder
from trainer.small.tiny import make_tiny_qwen3

ANSWER = "She has 2 + 3 = <<2+3=5>>5 clips.\n#### 5"
CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model") / "bytes", preset="gsm8k")


def file_of(folder: Path, *records: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read(folder: Path, *records: Any, **settings: Any) -> list[tuple[Any, str | None]]:
    source = DataConfig(type="file", path=file_of(folder, *records), **settings)
    return [(row.text or row.messages, row.response) for row in load_rows(source, responses=True).rows]


def test_prompt_and_response_stand_in_their_fields(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        {"prompt": "1+1=", "response": "2"},
        {"prompt": CHAT, "chosen": "Two.", "rejected": "Three."},
        {"prompt": [*CHAT, {"role": "assistant", "content": "2"}]},
    )
    asked = (("user", "1+1?"),)
    assert rows == [("1+1=", "2"), (asked, "Two."), (asked, "2")]


def test_fields_are_named_by_the_config(tmp_path: Path) -> None:
    record = {"prompt": "not this", "extra_info": {"question": "1+1?", "answer": "2"}}
    named = {"prompt_key": "extra_info.question", "response_key": "extra_info.answer"}
    assert read(tmp_path, record, **named) == [("1+1?", "2")]
    chat = {"messages": [*CHAT, {"role": "assistant", "content": "2"}]}
    assert read(tmp_path, chat, prompt_key="messages") == [((("user", "1+1?"),), "2")]


def test_a_row_without_a_response_is_refused_with_its_line(tmp_path: Path) -> None:
    good = {"prompt": "1+1=", "response": "2"}
    with pytest.raises(ValueError) as told:
        read(tmp_path, good, {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "response": " "}, good)
    assert "2 of 4 rows cannot be used" in str(told.value)
    assert "rows.jsonl:2: no response or chosen (fields: prompt, answer)" in str(told.value)
    assert "rows.jsonl:3: empty response" in str(told.value)


def test_few_refused_rows_are_allowed_where_the_config_says_so(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"prompt": "a", "response": "b"}, {"response": "b"})
    report = load_rows(DataConfig(type="file", path=path, max_reject_share=0.5), responses=True)
    assert len(report.rows) == 1
    assert [str(one) for one in report.rejects] == [f"{path}:2: no prompt (fields: response)"]


def test_reinforcement_learning_still_asks_such_files_for_a_ground_truth(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing reward"):
        load_rows(DataConfig(type="file", path=file_of(tmp_path, {"prompt": "a", "response": "b"})))


def test_arithmetic_answers_with_the_sum() -> None:
    rows = load_rows(DataConfig(type="arithmetic", digits=1, limit=5), responses=True).rows
    sums = [str(sum(int(part) for part in (row.text or "").rstrip("=").split("+"))) for row in rows]
    assert [row.response for row in rows] == [row.ground_truth for row in rows] == sums


@pytest.mark.parametrize("converted", [False, True], ids=["jsonl", "parquet"])
def test_gsm8k_answers_with_its_reasoning(tmp_path: Path, converted: bool) -> None:
    from rollout.datasets.gsm8k import convert

    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "How many?", "answer": ANSWER}) + "\n")
    if converted:
        convert(tmp_path, tmp_path / "parquet")
    folder = tmp_path / "parquet" if converted else tmp_path
    (row,) = load_rows(DataConfig(type="gsm8k", path=str(folder)), responses=True).rows
    assert (row.response, row.ground_truth) == (ANSWER, "5")


def test_random_prompts_have_no_responses() -> None:
    with pytest.raises(ValueError, match="random:1: no response"):
        load_rows(DataConfig(type="random", size=3), responses=True)


def test_a_response_begins_where_the_rollouts_prompt_ends_and_ends_as_their_samples_do(model: Path) -> None:
    encode, tokenizer = PromptEncoder(str(model)), AutoTokenizer.from_pretrained(model)
    prompt, response = encode("", [("user", "1+1?")]), encode.response("Two.")
    whole = [*CHAT, {"role": "assistant", "content": "Two."}]
    assert response.dtype == np.int32 and response[-1] == tokenizer.eos_token_id
    rendered = tokenizer.apply_chat_template(whole, tokenize=False)
    assert tokenizer.decode([*prompt, *response]) == rendered.removesuffix("\n"), "the template's own turn of words"
