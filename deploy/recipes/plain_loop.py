"""The bare baseline: synchronous GRPO on arithmetic, in one process, with `model.generate` and no services.

Every step draws prompts, samples a group for each, scores by exact match and takes one AdamW step. Weights are kept
with a time stamp while it runs and measured afterwards: measuring costs no run time. It prints one JSON line.
With --staleness k a step trains on the samples that the weights of k steps before have made.

    python -m deploy.recipes.plain_loop --model FOLDER --steps 380

Makes and warm-starts the demo model in FOLDER when there is none. Shapes: B samples, T tokens, V vocabulary.
"""

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.datasets import DataConfig, load_rows
from trainer.small.tiny import make_tiny_qwen3
from trainer.small.warmstart import greedy_accuracy, warm_start

Pair = tuple[str, str]
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 4}  # 3 digits and eos
RECORD = {"return_dict_in_generate": True, "output_logits": True}
GOAL = 0.85
CLIP_LOW, CLIP_HIGH = 0.2, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one step: all tokens (the first `prompt_length` are prompt); the rest is for response tokens."""

    tokens_BT: torch.Tensor
    prompt_length: int
    behaviour_logprobs_BT: torch.Tensor
    mask_BT: torch.Tensor
    advantages_B: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Weights after a step, and the seconds of run time until then."""

    step: int
    seconds: float
    weights: dict[str, torch.Tensor]


def main() -> None:
    """Read the flags, run, measure, print one JSON line (and write it to --out)."""
    flags = _flags()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(flags.seed)
    train, test = _pairs("train"), _pairs("test")
    if not (Path(flags.model) / "config.json").exists():
        make_tiny_qwen3(flags.model, seed=flags.seed)
        warm_start(flags.model, train, held_out=test, seed=flags.seed)
    tokenizer = AutoTokenizer.from_pretrained(flags.model)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()
    snapshots = run(model, tokenizer, train, flags)
    curve = [_point(model, tokenizer, test, snapshot) for snapshot in snapshots]
    line = json.dumps(report(curve, last=snapshots[-1], samples_per_step=flags.prompts * flags.samples))
    print(line)
    if flags.out:
        Path(flags.out).write_text(line + "\n", encoding="utf-8")


def run(model: Any, tokenizer: Any, rows: Sequence[Pair], flags: argparse.Namespace) -> list[Snapshot]:
    """Train until `steps` steps or `seconds` seconds are over; weights before, every few steps, and after."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr, betas=(0.9, 0.95), weight_decay=0.0)
    draw = random.Random(flags.seed)
    waiting: deque[Batch] = deque()
    snapshots = [_snapshot(model, step=0, seconds=0.0)]
    start = time.perf_counter()
    step, seconds = 0, 0.0
    while step < flags.steps and seconds < flags.seconds:
        prompts = draw.sample(rows, flags.prompts)
        waiting.append(sample(model, tokenizer, prompts, samples=flags.samples))
        if len(waiting) <= flags.staleness:
            continue
        for group in optimizer.param_groups:
            group["lr"] = flags.lr * learning_rate_share(step, steps=flags.steps)
        _train_step(model, optimizer, waiting.popleft())
        step += 1
        seconds = time.perf_counter() - start
        if step % flags.snapshot_every == 0:
            snapshots.append(_snapshot(model, step=step, seconds=seconds))
    if snapshots[-1].step != step:
        snapshots.append(_snapshot(model, step=step, seconds=seconds))
    return snapshots


def learning_rate_share(step: int, *, steps: int) -> float:
    """Share (0 to 1) of the learning rate at a step from 0 on: ten steps up, then linearly down to 5 % at `steps`."""
    return min((step + 1) / 10, 1.0 - 0.95 * step / steps)


@torch.no_grad()
def sample(model: Any, tokenizer: Any, pairs: Sequence[Pair], *, samples: int) -> Batch:
    """Draw `samples` responses for each (prompt, answer) at temperature 1 and score them by exact match."""
    inputs = tokenizer([prompt for prompt, _ in pairs for _ in range(samples)], return_tensors="pt")
    made = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **SAMPLING, **RECORD)
    prompt_length = inputs["input_ids"].shape[1]
    response_BT = made.sequences[:, prompt_length:]
    logprobs_BTV = torch.stack(made.logits, dim=1).log_softmax(-1)
    ended_BT = (response_BT == tokenizer.eos_token_id).long().cumsum(1)
    texts = tokenizer.batch_decode(response_BT, skip_special_tokens=True)
    rewards = [float(text == pairs[row // samples][1]) for row, text in enumerate(texts)]
    return Batch(
        tokens_BT=made.sequences,
        prompt_length=prompt_length,
        behaviour_logprobs_BT=logprobs_BTV.gather(-1, response_BT.unsqueeze(-1)).squeeze(-1),
        mask_BT=((ended_BT == 0) | ((ended_BT == 1) & (response_BT == tokenizer.eos_token_id))).float(),
        advantages_B=group_advantages(torch.tensor(rewards), samples=samples),
    )


def group_advantages(rewards_B: torch.Tensor, *, samples: int) -> torch.Tensor:
    """GRPO: (reward - mean of its group) / (unbiased standard deviation of its group + 1e-6)."""
    groups = rewards_B.view(-1, samples)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()


def policy_loss(logprobs_BT: torch.Tensor, batch: Batch) -> torch.Tensor:
    """PPO's clipped loss against the behaviour policy, mean over response tokens."""
    ratio_BT = (logprobs_BT - batch.behaviour_logprobs_BT).exp()
    advantages_B1 = batch.advantages_B.unsqueeze(1)
    clipped_BT = ratio_BT.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages_B1
    loss_BT = -torch.minimum(ratio_BT * advantages_B1, clipped_BT)
    return (loss_BT * batch.mask_BT).sum() / batch.mask_BT.sum()


def report(curve: Sequence[dict[str, Any]], *, last: Snapshot, samples_per_step: int) -> dict[str, Any]:
    """What the run took (seconds of run time) and reached."""
    reached = next((point for point in curve if point["accuracy"] >= GOAL), None)
    return {
        "wall_seconds": round(last.seconds, 2),
        "steps": last.step,
        "accuracy_before": curve[0]["accuracy"],
        "accuracy_after": curve[-1]["accuracy"],
        "seconds_to_85": reached["seconds"] if reached else None,
        "steps_to_85": reached["step"] if reached else None,
        "samples_per_second": round(last.step * samples_per_step / last.seconds, 1) if last.seconds else 0.0,
        "curve": curve,
    }


def _point(model: Any, tokenizer: Any, test: Sequence[Pair], snapshot: Snapshot) -> dict[str, Any]:
    model.load_state_dict(snapshot.weights)
    accuracy = greedy_accuracy(model, tokenizer, test)
    return {"step": snapshot.step, "seconds": round(snapshot.seconds, 2), "accuracy": round(accuracy, 4)}


def _train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    logits_BTV = model(input_ids=batch.tokens_BT[:, :-1]).logits[:, batch.prompt_length - 1 :]
    response_BT = batch.tokens_BT[:, batch.prompt_length :]
    logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, response_BT.unsqueeze(-1)).squeeze(-1)
    optimizer.zero_grad(set_to_none=True)
    policy_loss(logprobs_BT, batch).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _snapshot(model: Any, *, step: int, seconds: float) -> Snapshot:
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Snapshot(step=step, seconds=seconds, weights=weights)


def _pairs(split: str) -> list[Pair]:
    report = load_rows(DataConfig.model_validate({"type": "arithmetic", "split": split}))
    return [(row.text or "", row.ground_truth) for row in report.rows]


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model; made and warm-started when missing")
    parser.add_argument("--steps", type=int, default=380, help="the learning rate falls linearly over them")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt: the group")
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--staleness", type=int, default=0, help="steps between making and training a sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this run time")
    parser.add_argument("--snapshot-every", type=int, default=10, help="steps between kept weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="file for the JSON line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
