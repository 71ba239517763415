"""Policy gradient as one would write it on one page: the yardstick that the services' steps are measured against.

Dimensions: B samples, T tokens (prompt and response), R response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import protos
from protos.arrays import from_array
from services.records.book import Batch

Estimate = Callable[[list[protos.Trajectory]], Sequence[float | Tensor]]
"""The samples of a batch -> an advantage, or one for each token, for each of those that are trained on."""


def group_advantages(samples: list[protos.Trajectory]) -> list[float]:
    """(reward - mean of its group) / (unbiased standard deviation of its group + 1e-6)."""
    groups: dict[int, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.key.group, []).append(sample.reward)
    return [
        (sample.reward - float(np.mean(rewards))) / (float(np.std(rewards, ddof=1)) + 1e-6)
        for sample in samples
        for rewards in [groups[sample.key.group]]
    ]


def over_greedy(samples: list[protos.Trajectory]) -> list[float]:
    """Reward - reward of the greedy sample of its group."""
    greedy = {sample.key.group: sample.reward for sample in samples if sample.baseline}
    return [sample.reward - greedy[sample.key.group] for sample in samples if not sample.baseline]


def train(
    model_folder: Path, batches: Iterable[Batch], *, lr: float, decay: float, estimate: Estimate = group_advantages
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on recorded batches: the loss of each step, and the weights after the last."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch.trajectories, estimate)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def loss_of(model: torch.nn.Module, trajectories: list[protos.Trajectory], estimate: Estimate) -> Tensor:
    """Policy gradient, corrected for the sampler by a weight of at most 2, mean over tokens."""
    samples = [sample for sample in trajectories if not sample.baseline]
    advantages = estimate(trajectories)
    total, tokens = torch.zeros(()), 0
    for sample, advantage in zip(samples, advantages, strict=True):
        logprobs_R = response_logprobs(model, sample)
        behaviour_R = torch.tensor(from_array(sample.behaviour_logprobs))
        weight_R = (logprobs_R.detach() - behaviour_R).exp().clamp(max=2.0)
        ratio_R = (logprobs_R - logprobs_R.detach()).exp()  # one update a batch: the clip never binds
        total = total - (weight_R * ratio_R * advantage).sum()
        tokens += len(behaviour_R)
    return total / tokens


def response_logprobs(model: torch.nn.Module, sample: protos.Trajectory) -> Tensor:
    """Logprobs of the response tokens under `model`, [R]."""
    response_R = torch.tensor(from_array(sample.response_ids), dtype=torch.int64)
    return next_logprobs(model, sample).gather(-1, response_R[:, None]).squeeze(-1)


def next_logprobs(model: torch.nn.Module, sample: protos.Trajectory) -> Tensor:
    """Logprobs of every token in each place of the response, [R, V]."""
    prompt, response = from_array(sample.prompt_ids), from_array(sample.response_ids)
    ids_1T = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)[None]
    logprobs: Tensor = model(input_ids=ids_1T).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs
