"""A learner with a critic against plain torch, and what must not change its result. R response tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.unit.trainer.test_step import tiny_model, trajectories, weights
from trainer.batch import Trajectory
from trainer.checkpoints.failure import CheckpointFailed
from trainer.checkpoints.restore import restore
from trainer.checkpoints.snapshot import snapshot
from trainer.checkpoints.store import CheckpointStore
from trainer.config import AlgorithmConfig, CheckpointConfig, TrainerConfig
from trainer.configs.critic import CriticConfig
from trainer.configs.guards import GuardsConfig
from trainer.configs.section import Section
from trainer.configs.update import OptimizerConfig
from trainer.critic.model import ValueModel, load_critic
from trainer.critic.updates import return_metrics
from trainer.small.tiny import SHAPES, make_tiny_qwen3
from trainer.step import Learner

GAMMA, LAM, BOUND, KL = 0.95, 0.9, 2.0, 0.1
torch.set_num_threads(1)


def learner(
    *, dtype: torch.dtype = torch.float32, lr: float = 1e-2, critic: dict[str, Any] | None = None, **config: Any
) -> Learner:
    algorithm = {"adv_estimator": "gae", "loss": "vanilla"} | config.pop("algorithm", {})
    section = CriticConfig(**{"optimizer": {"lr": lr}} | (critic or {}))
    told = TrainerConfig(
        model="tiny",
        device="cpu",
        **{"max_tokens_per_microbatch": 32} | config,
        algorithm=AlgorithmConfig(**algorithm),
        optimizer=OptimizerConfig(lr=lr),
        critic=section,
    )
    return Learner(tiny_model(dtype=dtype), told, critic=ValueModel(tiny_model(1, dtype), section, seed=3))


def critic_weights(found: Learner) -> Tensor:
    assert found.critic is not None
    return weights(found.critic.model)


# Against a plain loop.


class Plain:
    """PPO with a critic, one sample at a time; two optimizers, no packing, no shortcut."""

    def __init__(self, policy: nn.Module, critic: ValueModel, *, lr: float) -> None:
        self.policy, self.body, self.head = policy, critic.body, critic.head
        self.steps = [torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.01) for m in (policy, critic)]

    def logprobs(self, t: Trajectory) -> Tensor:
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
        logits = self.policy(input_ids=ids[None]).logits[0, len(t.prompt_ids) - 1 : -1]
        return torch.log_softmax(logits, -1)[torch.arange(len(t.response_ids)), ids[len(t.prompt_ids) :]]

    def values(self, t: Trajectory) -> Tensor:
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
        hidden = self.body(input_ids=ids[None]).last_hidden_state[0, len(t.prompt_ids) - 1 : -1]
        return BOUND * torch.tanh((hidden @ self.head.weight[0] + self.head.bias) / BOUND)

    def step(self, batch: Sequence[Trajectory]) -> tuple[list[float], list[float]]:
        """Losses of the policy's four updates and of the critic's three."""
        with torch.no_grad():  # the batch holds float32
            old = [self.logprobs(t).float().double() for t in batch]
            old_values = [self.values(t).float().double() for t in batch]
        masks = [torch.from_numpy(t.loss_mask).double() for t in batch]
        raw = [self.differences(*row) for row in zip(batch, old, old_values, masks, strict=True)]
        returns = [one + value for one, value in zip(raw, old_values, strict=True)]
        counted = torch.cat([one[mask > 0] for one, mask in zip(raw, masks, strict=True)])
        advantages = [(one - counted.mean()) / (counted.var() + 1e-8).sqrt() for one in raw]
        halves = [list(rows) for rows in np.array_split(np.arange(len(batch)), 2)]
        whole = [list(range(len(batch)))]

        def critic_loss(row: int) -> Tensor:
            value = self.values(batch[row])
            bounded = value.clamp(old_values[row] - 0.1, old_values[row] + 0.1)
            worst = torch.maximum((value - returns[row]).square(), (bounded - returns[row]).square())
            return 0.5 * (worst * masks[row]).sum()

        def policy_loss(row: int) -> Tensor:
            ratio, advantage = (self.logprobs(batch[row]) - old[row]).exp(), advantages[row]
            loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
            loss = torch.where(advantage < 0, torch.minimum(-3 * advantage, loss), loss)
            return (loss * masks[row]).sum()

        tokens = [float(mask.sum()) for mask in masks]
        critic = [self.update(1, rows, critic_loss, tokens, factor=0.5) for rows in whole * 3]
        policy = [self.update(0, rows, policy_loss, tokens) for rows in halves * 2]
        return policy, [loss / 0.5 for loss in critic]

    @staticmethod
    def differences(t: Trajectory, old: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        rewards = -KL * (old - torch.from_numpy(t.reference_logprobs)) * mask
        rewards[-1] += float(np.float32(t.reward))
        found, following, carried = torch.zeros_like(values), torch.zeros(()), torch.zeros(())
        for at in reversed(range(len(values))):
            if mask[at]:
                carried = rewards[at] + GAMMA * following - values[at] + GAMMA * LAM * carried
                following = values[at]
            found[at] = carried
        return found

    def update(self, which: int, rows: list[int], loss_of: Any, tokens: list[float], factor: float = 1.0) -> float:
        count = sum(tokens[row] for row in rows)
        loss = factor * sum(loss_of(row) for row in rows) / count
        loss.backward()
        parameters = [one for group in self.steps[which].param_groups for one in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.steps[which].step()
        self.steps[which].zero_grad()
        return float(loss.detach())


def test_steps_with_a_critic_give_the_weights_and_losses_of_a_plain_torch_loop() -> None:
    critic = {"bound": BOUND, "head_init": 0.3, "cliprange_value": 0.1, "vf_coef": 0.5, "epochs": 3, "minibatches": 1}
    algorithm: dict[str, Any] = {"gamma": GAMMA, "gae_lambda": LAM, "epochs": 2, "minibatches": 2}
    algorithm |= {"kl_use": "reward", "kl_coef": KL, "kl_estimator": "k1"}
    ours = learner(dtype=torch.float64, lr=3e-3, critic=critic, algorithm=algorithm)
    theirs = learner(dtype=torch.float64, lr=3e-3, critic=critic, algorithm=algorithm)
    assert theirs.critic is not None
    plain = Plain(theirs.model, theirs.critic.model, lr=3e-3)
    for step in range(2):
        batch = trajectories(step, masked=True)
        told, (policy, values) = ours.train(batch, step=step, policy_version=3), plain.step(batch)
        assert told["value_loss"] == pytest.approx(np.mean(values), abs=1e-6)
        assert told["loss"] == pytest.approx(np.mean(policy), abs=1e-6)
        assert (told["updates"], told["critic_updates"]) == (4, 3)
    assert told["value_clip_fraction"] > 0
    torch.testing.assert_close(critic_weights(ours), critic_weights(theirs), rtol=0, atol=1e-6)
    torch.testing.assert_close(weights(ours.model), weights(theirs.model), rtol=0, atol=1e-6)


# What must not change it.


def moments(**options: Any) -> Tensor:
    """First moments of the critic after one double-precision step: its gradient."""
    found = learner(dtype=torch.float64, critic={"head_init": 0.3}, **options)
    found.train(trajectories(1, masked=True), step=0, policy_version=3)
    assert found.critic is not None
    return torch.cat([state["exp_avg"].flatten() for state in found.critic.optimizer.state.values()])


@pytest.mark.parametrize(
    "options", [{"max_tokens_per_microbatch": 3}, {"gradient_checkpointing": True}, {"offload": "all"}]
)
def test_neither_micro_batches_nor_memory_savings_change_the_gradient(options: dict[str, Any]) -> None:
    torch.testing.assert_close(moments(**options), moments(), rtol=0, atol=1e-9)


def test_the_first_values_are_zero_and_the_global_seed_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    model = tiny_model(1)
    torch.manual_seed(5)
    ValueModel(model, CriticConfig(), seed=0)
    assert torch.equal(torch.rand(1), expected)
    told = learner().train(trajectories(0), step=0, policy_version=3)
    assert told["value_mean"] == told["explained_variance"] == 0
    assert told["critic_grad_norm"] > 0


def test_values_stay_within_their_bound() -> None:
    free, bound = (learner(critic={"head_init": 9.0, "bound": limit}) for limit in (None, 0.5))
    free_BR, bound_BR = (
        found._prepare(trajectories(0), step=0, policy_version=3, kl_coef=0.0).values_BR for found in (free, bound)
    )
    assert free_BR is not None and bound_BR is not None
    assert free_BR.abs().max() > 1
    torch.testing.assert_close(bound_BR, 0.5 * torch.tanh(free_BR / 0.5))


def test_the_critic_learns_what_rewards_are() -> None:
    found = learner(lr=2e-2, critic={"epochs": 4})
    batch = trajectories(0, groups=8, group_size=1)  # samples of one prompt share a first value
    told = [found.train(batch, step=step, policy_version=3) for step in range(30)]
    assert told[0]["explained_variance"] == 0
    assert told[-1]["explained_variance"] > 0.9
    assert told[-1]["value_loss"] < 0.1 * told[0]["value_loss"]


# Warm-up, skipped updates, memory.


def test_the_policy_waits_while_the_critic_warms_up() -> None:
    found = learner(critic={"warmup_steps": 2}, algorithm={"minibatches": 2})
    before = weights(found.model)
    told = [found.train(trajectories(step), step=step, policy_version=3) for step in range(3)]
    assert [row["updates"] for row in told] == [0, 0, 2]
    assert [row.get("updates_left_out") for row in told] == [2, 2, None]
    assert [row["critic_updates"] for row in told] == [2, 2, 2]
    assert (found.schedule_position, found.critic and found.critic.position) == (1, 3)
    fresh = learner(critic={"warmup_steps": 2})
    fresh.train(trajectories(0), step=0, policy_version=3)
    assert torch.equal(weights(fresh.model), before)


@pytest.mark.parametrize("warmup_steps", [0, 9])
def test_a_poisoned_critic_skips_its_updates_until_the_run_stops(warmup_steps: int) -> None:
    found = learner(
        critic={"warmup_steps": warmup_steps}, guards=GuardsConfig(max_skips_in_a_row=2), max_tokens_per_microbatch=1
    )
    assert found.critic is not None
    with torch.no_grad():
        found.critic.model.head.weight[0, 0] = float("inf")
    told = found.train(trajectories(0), step=0, policy_version=3)
    assert (told["critic_skipped"], told["critic_updates"]) == (1, 0)
    assert found.guards.skips_in_a_row["critic"] == 1 and found.guards.stop_reason == ""
    found.train(trajectories(1), step=1, policy_version=3)
    skip = next(one for one in found.guards.skips if one.of == "critic")
    assert skip.samples == tuple(one.sample for one in trajectories(1))
    assert skip.suspects and skip.reason == "critic's loss is nan"
    assert found.guards.stop_reason.startswith("2 updates in a row were left out")


def test_a_resting_critic_lies_in_host_memory_and_comes_back() -> None:
    kept, moved = learner(), learner(critic={"offload": "all"})
    moved.rest()
    assert moved.critic is not None and moved.critic._offload._hosts
    for step in range(2):
        for found in (kept, moved):
            found.train(trajectories(step), step=step, policy_version=3)
    held = {host.data_ptr() for host in moved.critic._offload._hosts.values()}
    assert {one.data_ptr() for one in moved.critic.model.parameters()} <= held
    assert torch.equal(critic_weights(moved), critic_weights(kept))


def test_return_metrics_by_hand() -> None:
    returns = torch.tensor([[0.0, 2.0], [4.0, 99.0]])
    values, mask = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    told = return_metrics(values, returns, mask)  # errors -1, 0, 1: variance 2/3 of 8/3
    assert told == pytest.approx({"return_mean": 2.0, "explained_variance": 0.75})
    assert return_metrics(values, torch.ones(2, 2), mask) == {"return_mean": 1.0}


# Settings and loading.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": {"adv_estimator": "gae"}}, "needs the values of a critic"),
        ({"critic": {}}, "adv_estimator='grpo' takes no values"),
        ({"critic": {"loss_scale_factor": 2}}, "needs loss_aggregation='seq-mean-token-sum-norm'"),
        ({"critic": {"bound": 0}}, "greater than 0"),
        ({"algorithm": {"gae_lambda": 0.9}}, "gae_lambda=0.9 does nothing"),
        ({"algorithm": {"gamma": 0.9}}, "gamma=0.9 does nothing"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig(model="tiny", **fields)
    assert issubclass(CriticConfig, Section)


def test_a_critic_is_loaded_from_the_start_model_or_its_own_folder(tmp_path: Path) -> None:
    demo = make_tiny_qwen3(tmp_path / "demo")
    small = make_tiny_qwen3(tmp_path / "small", shape=replace(SHAPES["demo"], num_layers=1))
    other = make_tiny_qwen3(tmp_path / "other", preset="gsm8k")
    algorithm = AlgorithmConfig(adv_estimator="gae")

    def loaded(model: Path | None) -> ValueModel | None:
        critic = CriticConfig(model=None if model is None else str(model))
        return load_critic(TrainerConfig(model=str(demo), algorithm=algorithm, critic=critic), device="cpu")

    assert load_critic(TrainerConfig(model=str(demo)), device="cpu") is None
    sizes = [found.body.config.num_hidden_layers for model in (None, small) if (found := loaded(model)) is not None]
    assert sizes == [SHAPES["demo"].num_layers, 1]
    with pytest.raises(ValueError, match="has another vocabulary"):
        loaded(other)


# Checkpoints.


def resumable(model: Path) -> Learner:
    found = learner(critic={"warmup_steps": 1, "optimizer": {"lr": 1e-2, "schedule": "linear", "total_steps": 5}})
    found.config = found.config.model_copy(update={"model": str(model)})
    return found


def test_a_checkpoint_holds_the_critic_and_gives_it_back_bit_for_bit(tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model")
    first, second = resumable(model), resumable(model)
    for step in range(2):
        first.train(trajectories(step), step=step, policy_version=3)
    store = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(), incarnation=1)
    folder = store.write(snapshot(first, step=2, policy_version=2))
    restore(folder, second)
    assert (second.critic and second.critic.position, second.schedule_position) == (2, 1)
    assert torch.equal(critic_weights(second), critic_weights(first))
    told = [found.train(trajectories(2), step=2, policy_version=3) for found in (first, second)]
    assert told[0] == told[1]
    assert torch.equal(critic_weights(second), critic_weights(first))
    assert torch.equal(weights(second.model), weights(first.model))
    (folder / "critic-model.safetensors").unlink()
    with pytest.raises(CheckpointFailed, match=r"has no critic-model\.safetensors"):
        restore(folder, resumable(model))
