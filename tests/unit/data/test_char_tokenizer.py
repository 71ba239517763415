"""The tokenizers that need no download: whole round trips, before and after saving."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.small.char_tokenizer import ARITHMETIC_ALPHABET, byte_tokenizer, char_tokenizer

EVERYTHING = 'Ann\'s caf\u00e9 sells 12 cakes at $3.50.\n\tWhat is "50%" of that? \U0001f600'


def test_every_character_of_the_alphabet_is_one_token_and_comes_back() -> None:
    tokenizer = char_tokenizer()
    ids = tokenizer(ARITHMETIC_ALPHABET)["input_ids"]
    assert ids == list(range(3, 3 + len(ARITHMETIC_ALPHABET)))
    assert tokenizer.decode(ids) == ARITHMETIC_ALPHABET
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, len(tokenizer)) == (0, 1, 2, 20)


def test_special_tokens_are_left_out_when_asked() -> None:
    tokenizer = char_tokenizer()
    assert tokenizer.decode([4, 5, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == "12"


def test_a_foreign_character_is_the_unknown_token() -> None:
    assert char_tokenizer()("1x2")["input_ids"] == [4, 2, 5]


@pytest.mark.parametrize("alphabet", ["", "aa"])
def test_an_empty_or_repeating_alphabet_is_an_error(alphabet: str) -> None:
    with pytest.raises(ValueError, match="without repetition"):
        char_tokenizer(alphabet)


@pytest.mark.parametrize(("tokenizer", "text"), [(char_tokenizer(), "12+34= 46\n"), (byte_tokenizer(), EVERYTHING)])
def test_a_saved_tokenizer_loads_and_gives_the_same(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded(text)["input_ids"]
    assert ids == tokenizer(text)["input_ids"]
    assert loaded.decode(ids) == text
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.eos_token, loaded.pad_token, loaded.padding_side) == (
        tokenizer.eos_token,
        tokenizer.pad_token,
        "left",
    )


def test_the_byte_tokenizer_takes_one_token_for_each_byte() -> None:
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 259
    assert len(tokenizer(EVERYTHING)["input_ids"]) == len(EVERYTHING.encode())


def test_the_chat_templates_write_messages_out() -> None:
    messages = [{"role": "user", "content": "1+1="}]
    chatml = byte_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chatml == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert char_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "1+1="
