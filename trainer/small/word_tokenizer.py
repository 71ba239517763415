"""A tokenizer that needs no download for a vocabulary of any size: one token per word, the words being t0, t1, ..."""

from transformers import PreTrainedTokenizerFast

from trainer.small.char_tokenizer import EOS, PAD, UNKNOWN, of_words

SPECIALS = (PAD, EOS, UNKNOWN)


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """pad (0), eos (1), unknown (2), then "t0" to "t<vocab_size - 4>", split at white space: every id has a word.

    Any other word becomes the unknown token. Raises ValueError where there is no room for a word.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    if vocab_size <= len(SPECIALS):
        raise ValueError(f"a vocabulary of {vocab_size} has no room for words")
    words = (f"t{number}" for number in range(vocab_size - len(SPECIALS)))
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return of_words(backend)
