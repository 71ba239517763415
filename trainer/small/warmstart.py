"""A supervised warm start: a random model learns just enough for its samples to be right now and then.

Rows are (prompt, answer) pairs of text. The demo stops at about 35 % so that reinforcement learning has a signal.
Shapes: B rows, T tokens, V vocabulary.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

Pair = tuple[str, str]
IGNORED = -100
RAMP = 20  # steps of rising learning rate: without them some seeds take twice as long
PROBE = 512  # held-out rows that are enough to see when to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """What a warm start did: optimizer steps taken, mean loss (nats per token) of the last one, held-out accuracy."""

    steps: int
    loss: float
    accuracy: float


def warm_start(
    folder: Path | str,
    rows: Sequence[Pair],
    *,
    held_out: Sequence[Pair],
    steps: int = 600,
    batch_size: int = 64,
    lr: float = 2e-3,
    seed: int = 0,
    target_accuracy: float = 0.36,
    evaluate_every: int = 10,
) -> WarmStart:
    """Train the model in `folder` in place on prompt + answer + eos; stop at `target_accuracy` or after `steps`.

    The loss is the mean cross-entropy of the answer and eos tokens; the accuracy is greedy exact match on `held_out`
    (while it trains: on its first 512 rows, every `evaluate_every` steps).
    The same folder, rows and seed give the same weights on one machine. Raises ValueError when rows are missing.
    """
    if not rows or not held_out or steps < 1:
        raise ValueError(f"a warm start needs rows, held-out rows and steps, not {len(rows)}, {len(held_out)}, {steps}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    draw = random.Random(seed)
    loss = 0.0
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / RAMP)
        loss = _supervised_step(model, optimizer, tokenizer=tokenizer, pairs=draw.choices(rows, k=batch_size))
        if step % evaluate_every == 0 and greedy_accuracy(model, tokenizer, held_out[:PROBE]) >= target_accuracy:
            break
    model.save_pretrained(folder)
    return WarmStart(steps=step, loss=loss, accuracy=greedy_accuracy(model, tokenizer, held_out))


def greedy_accuracy(model: Any, tokenizer: Any, rows: Sequence[Pair], *, batch_size: int = 512) -> float:
    """Share (0 to 1) of rows whose greedy response, decoded without special tokens, equals the answer exactly."""
    if not rows:
        raise ValueError("no rows to measure an accuracy on")
    was_training = model.training
    model.eval()
    right = 0
    for start in range(0, len(rows), batch_size):
        chunk = rows[start : start + batch_size]
        responses = _greedy(model, tokenizer, chunk)
        right += sum(response == answer for response, (_, answer) in zip(responses, chunk, strict=True))
    model.train(was_training)
    return right / len(rows)


@torch.no_grad()
def _greedy(model: Any, tokenizer: Any, rows: Sequence[Pair]) -> list[str]:
    longest = max(len(tokenizer(answer, add_special_tokens=False)["input_ids"]) for _, answer in rows)
    inputs = tokenizer([prompt for prompt, _ in rows], return_tensors="pt", padding=True, padding_side="left")
    tokens_BT = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=False,
        max_new_tokens=longest + 1,
    )
    return list(tokenizer.batch_decode(tokens_BT[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def _supervised_step(model: Any, optimizer: torch.optim.Optimizer, *, tokenizer: Any, pairs: Sequence[Pair]) -> float:
    tokens_BT, mask_BT, labels_BT = collate(tokenizer, pairs)
    logits_BTV = model(input_ids=tokens_BT, attention_mask=mask_BT).logits
    loss = cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def collate(tokenizer: Any, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded (tokens_BT, attention mask_BT, labels_BT); prompt and padding carry the label -100."""
    prompts = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt, _ in pairs]
    answers = [
        tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for _, answer in pairs
    ]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens_BT = torch.full((len(pairs), width), tokenizer.pad_token_id, dtype=torch.long)
    mask_BT = torch.zeros_like(tokens_BT)
    labels_BT = torch.full_like(tokens_BT, IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens_BT[row, :end] = torch.tensor(prompt + answer)
        mask_BT[row, :end] = 1
        labels_BT[row, len(prompt) : end] = torch.tensor(answer)
    return tokens_BT, mask_BT, labels_BT
