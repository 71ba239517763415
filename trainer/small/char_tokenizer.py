"""Tokenizers that need no download: one token per character, and one token per byte.

Both are ordinary `PreTrainedTokenizerFast` objects: they save as Hugging Face files and load with `AutoTokenizer`.
"""

from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ARITHMETIC_ALPHABET = "0123456789+-*/= \n"
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

TEXT_END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def char_tokenizer(alphabet: str = ARITHMETIC_ALPHABET) -> PreTrainedTokenizerFast:
    """One token per character of `alphabet`, after pad (0), eos (1) and unknown (2); no begin token, no normalising.

    A character outside the alphabet becomes the unknown token, so the text does not come back whole.
    Raises ValueError when the alphabet is empty or repeats a character.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ValueError(f"the alphabet must be characters without repetition, not {alphabet!r}")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *alphabet])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return of_words(backend)


def of_words(backend: "Tokenizer") -> PreTrainedTokenizerFast:
    """A word-level vocabulary with pad, eos and unknown as transformers has it; messages are joined as they are."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte (ids below 256) and three ChatML specials, with a chat template: it encodes any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([TEXT_END, TURN_START, TURN_END])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=TEXT_END,
        eos_token=TURN_END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
