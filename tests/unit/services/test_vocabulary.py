"""A reference with another tokenizer is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from services.errors import OffbeatError
from services.vocabulary import check_same_tokens
from trainer.small.char_tokenizer import byte_tokenizer, char_tokenizer


def test_a_reference_with_other_tokens_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, tokenizer in (("one", char_tokenizer()), ("same", char_tokenizer()), ("other", byte_tokenizer())):
        tokenizer.save_pretrained(tmp_path / name)
    check_same_tokens(str(tmp_path / "same"), str(tmp_path / "one"))
    with pytest.raises(OffbeatError, match=r"reference.model .*other has another tokenizer than the start model .*one"):
        check_same_tokens(str(tmp_path / "other"), str(tmp_path / "one"))
    (tmp_path / "none").mkdir()
    with caplog.at_level(logging.WARNING):
        check_same_tokens(str(tmp_path / "none"), str(tmp_path / "one"))
    assert [record.message for record in caplog.records if record.name == "services.vocabulary"] == [
        "tokenizers were not compared"
    ]
