"""Prompt text or chat to token ids, by the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer


class PromptEncoder:
    """Encodes prompts; a chat goes through the chat template with the assistant's turn opened."""

    def __init__(self, model: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def __call__(self, text: str, messages: Sequence[tuple[str, str]] = ()) -> npt.NDArray[np.int32]:
        """Token ids, int32 [P]; ValueError for a chat where the tokenizer has no chat template."""
        if messages:
            text = self._render(messages)
        ids = self._tokenizer(text, add_special_tokens=not messages, return_attention_mask=False)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def response(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids of a response as rollouts make it, the end token behind it, int32 [n].

        ValueError where the tokenizer has no end token.
        """
        end = self._tokenizer.eos_token_id
        if end is None:
            raise ValueError("the tokenizer has no end token (eos_token): a response could not end")
        ids = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return np.asarray([*ids, end], dtype=np.int32)

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
