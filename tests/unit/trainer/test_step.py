"""The learner against plain torch, and what must not change its result. B samples, T tokens, R response tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.advantages import ESTIMATORS, AdvantageInputs, AdvantageOptions
from trainer.batch import Trajectory
from trainer.config import POLICY_LOSSES, AlgorithmConfig, TrainerConfig
from trainer.configs.critic import CriticConfig
from trainer.configs.update import OptimizerConfig
from trainer.critic.model import ValueModel
from trainer.step import Learner

VOCABULARY = 17
LOSS_OPTIONS: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.1}}
"""What a policy loss cannot do without."""
torch.set_num_threads(1)


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.4,
        tie_word_embeddings=True,
    )
    model: nn.Module = Qwen3ForCausalLM(config).to(dtype)
    return model


def trajectories(seed: int, *, groups: int = 4, group_size: int = 4, masked: bool = False) -> list[Trajectory]:
    draw = np.random.default_rng(seed)
    found = []
    for index in range(groups * group_size):
        if index % group_size == 0:
            prompt_ids = draw.integers(0, VOCABULARY, draw.integers(1, 6)).astype(np.int32)
        length = int(draw.integers(1, 6))
        found.append(
            Trajectory(
                sample=f"s{index}",
                group=index // group_size,
                prompt_ids=prompt_ids,
                response_ids=draw.integers(0, VOCABULARY, length).astype(np.int32),
                behaviour_logprobs=-3.5 * draw.random(length).astype(np.float32),
                loss_mask=(draw.random(length) < 0.7).astype(np.uint8) if masked else None,
                reward=float(draw.random()),
                reward_parts={"exact": float(index % 3), "exact/form": float(index % 2)},
                reference_logprobs=-3.5 * draw.random(length).astype(np.float32),
                spans=((3, length),) if index % 2 else ((1, 1), *(((3, length - 1),) if length > 1 else ())),
                stop_reason="length" if index % 4 == 0 else "stop",
            )
        )
    return found


def learner(*, dtype: torch.dtype = torch.float32, lr: float = 1e-2, budget: int = 64, **algorithm: Any) -> Learner:
    critic = CriticConfig() if algorithm.get("adv_estimator") == "gae" else None
    config = TrainerConfig(
        model="tiny",
        device="cpu",
        max_tokens_per_microbatch=budget,
        algorithm=AlgorithmConfig(**algorithm),
        optimizer=OptimizerConfig(lr=lr, max_grad_norm=1.0),
        critic=critic,
    )
    value_model = None if critic is None else ValueModel(tiny_model(1, dtype), critic, seed=0)
    return Learner(tiny_model(dtype=dtype), config, critic=value_model)


def plain_grpo(model: nn.Module, batches: Sequence[Sequence[Trajectory]], *, lr: float) -> list[float]:
    """GRPO with decoupled PPO, one sample at a time: no batching, no packing, no shortcut."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    losses = []
    for batch in batches:
        tokens = sum(len(t.response_ids) for t in batch)
        total = 0.0
        for t in batch:
            rewards = torch.tensor([other.reward for other in batch if other.group == t.group])
            advantage = (t.reward - rewards.mean()) / (rewards.std() + 1e-6)
            ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
            logits = model(input_ids=ids[None]).logits[0, len(t.prompt_ids) - 1 : -1]
            logprobs = torch.log_softmax(logits, -1)[torch.arange(len(t.response_ids)), ids[len(t.prompt_ids) :]]
            old, behaviour = logprobs.detach(), torch.from_numpy(t.behaviour_logprobs)
            weight = (old - behaviour).exp().clamp(max=2.0)
            ratio = (logprobs - old).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = -(weight * surrogate).sum() / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trained(batch: Sequence[Trajectory], **options: Any) -> torch.Tensor:
    """Weights after one double-precision step; the step is large enough for the whole gradient to show."""
    found = learner(dtype=torch.float64, **options)
    found.train(batch, step=0, policy_version=3)
    return torch.cat([state["exp_avg"].flatten() for state in found.optimizer.state.values()])


def test_ten_steps_give_the_weights_and_losses_of_a_plain_torch_loop() -> None:
    batches = [trajectories(seed) for seed in range(10)]
    ours, plain = learner(lr=1e-3), tiny_model()
    found = [ours.train(batch, step=step, policy_version=step)["loss"] for step, batch in enumerate(batches)]
    assert found == pytest.approx(plain_grpo(plain, batches, lr=1e-3), abs=1e-5)
    torch.testing.assert_close(weights(ours.model), weights(plain), rtol=0, atol=1e-5)


def test_two_runs_agree_bit_for_bit() -> None:
    runs = [learner(epochs=2, minibatches=2) for _ in range(2)]
    told = [[run.train(trajectories(seed), step=seed, policy_version=3) for seed in range(3)] for run in runs]
    assert told[0] == told[1]
    assert torch.equal(weights(runs[0].model), weights(runs[1].model))


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**20),
    budget=st.integers(1, 200),
    aggregation=st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]),
)
def test_the_split_into_micro_batches_does_not_change_the_gradient(seed: int, budget: int, aggregation: str) -> None:
    batch = trajectories(seed, masked=True)
    options = {"loss_aggregation": aggregation, "kl_use": "loss", "kl_coef": 0.1, "entropy_coef": 0.01}
    whole = trained(batch, budget=10**6, **options)
    torch.testing.assert_close(trained(batch, budget=budget, **options), whole, rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**20), data=st.data())
def test_the_order_of_samples_does_not_change_the_gradient(seed: int, data: st.DataObject) -> None:
    batch = trajectories(seed)
    shuffled = data.draw(st.permutations(batch))
    torch.testing.assert_close(trained(shuffled), trained(batch), rtol=0, atol=1e-6)


def test_masked_tokens_may_hold_any_logprob() -> None:
    batch = trajectories(1, masked=True)
    changed = [
        replace(t, behaviour_logprobs=np.where(t.loss_mask == 1, t.behaviour_logprobs, np.float32(-9))) for t in batch
    ]
    assert torch.equal(trained(changed), trained(batch))


def test_samples_without_advantage_are_skipped_without_a_trace_in_the_weights() -> None:
    batch = [replace(t, reward=1.0) if t.group < 2 else t for t in trajectories(5)]
    found = learner()
    assert found.train(batch, step=0, policy_version=3)["samples_computed"] == 8
    torch.testing.assert_close(trained(batch), trained(batch, skip_zero_advantage=False), rtol=0, atol=1e-12)


def test_a_batch_without_any_advantage_still_decays_the_weights_as_adamw_does() -> None:
    batch = [replace(t, reward=1.0) for t in trajectories(5)]
    skipping, computing = learner(), learner(skip_zero_advantage=False)
    for run in (skipping, computing):
        run.train(trajectories(6), step=0, policy_version=3)
        run.train(batch, step=1, policy_version=3)
    assert torch.equal(weights(skipping.model), weights(computing.model))


def test_several_updates_clip_against_the_logprobs_from_before_the_first() -> None:
    found = learner(lr=0.05, epochs=3, minibatches=2).train(trajectories(2), step=0, policy_version=3)
    assert found["updates"] == 6
    assert found["ratio_max"] > 1.2
    assert found["clip_fraction_low"] + found["clip_fraction_high"] > 0


def test_the_kl_in_the_reward_changes_advantages_and_needs_a_reference() -> None:
    options = {"kl_use": "reward", "kl_coef": 0.5, "kl_estimator": "k1", "adv_estimator": "reinforce"}
    batch = trajectories(3)
    assert not torch.allclose(trained(batch, **options), trained(batch, adv_estimator="reinforce"))
    with pytest.raises(ValueError, match="needs reference logprobs"):
        trained([replace(t, reference_logprobs=None) for t in batch], **options)


def test_the_kl_coefficient_follows_its_target_and_stays_without_one() -> None:
    options: dict[str, Any] = {"kl_use": "reward", "kl_coef": 0.5, "kl_estimator": "k2", "kl_horizon": 100}
    batch = trajectories(3)
    for target, factor in ((1e-6, 1 + 0.2 * 16 / 100), (1e6, 1 - 0.2 * 16 / 100), (None, 1.0)):
        found = learner(kl_target=target, **options)
        assert found.train(batch, step=0, policy_version=3)["kl_coef"] == 0.5
        assert found.train(batch, step=1, policy_version=3)["kl_coef"] == pytest.approx(0.5 * factor)
    with pytest.raises(ValueError, match="kl_horizon=3 must exceed"):
        learner(kl_target=1.0, **options | {"kl_horizon": 3}).train(batch, step=0, policy_version=3)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_policy_loss_trains_two_steps_of_several_updates(loss: str) -> None:
    ours = learner(loss=loss, epochs=2, minibatches=2, **LOSS_OPTIONS.get(loss, {}))
    before = weights(ours.model)
    told = [ours.train(trajectories(seed, masked=True), step=seed, policy_version=3) for seed in range(2)]
    assert [(step["updates"], step["skipped"]) for step in told] == [(4, 0), (4, 0)]
    assert all(np.isfinite(list(step.values())).all() for step in told)
    assert told[1]["ratio_max"] > 1.0
    assert not torch.allclose(weights(ours.model), before, atol=1e-3)


def test_clip_cov_draws_by_seed_and_step_and_not_from_the_global_generator() -> None:
    def told(step: int, global_seed: int) -> torch.Tensor:
        torch.manual_seed(global_seed)
        found = learner(loss="clip_cov", clip_cov_low=-9, clip_cov_high=9, clip_cov_share=0.5)
        assert found.train(trajectories(0), step=step, policy_version=3)["covariance_fraction"] > 0.3
        return weights(found.model)

    assert torch.equal(told(1, 0), told(1, 1))
    assert not torch.equal(told(1, 0), told(2, 0))


@pytest.mark.parametrize("bypass_loss", ["ppo_clip", "reinforce"])
def test_bypass_corrects_within_each_update(bypass_loss: str) -> None:
    correction: dict[str, Any] = {"reject": [{"statistic": "seq_mean_k1", "high": 4.0}]}
    if bypass_loss == "reinforce":
        correction |= {"weights": "token", "normalize": True}
    found = learner(loss="bypass", bypass_loss=bypass_loss, correction=correction, epochs=2)
    told = [found.train(trajectories(seed), step=seed, policy_version=3) for seed in range(2)]
    assert all(0 < step["rejected_token_share"] < 1 and step["skipped"] == 0 for step in told)
    plain = learner(loss="vanilla", old_logprobs="behaviour", epochs=2)
    bare = learner(loss="bypass", epochs=2)
    for run in (plain, bare):
        run.train(trajectories(0), step=0, policy_version=3)
    assert torch.equal(weights(bare.model), weights(plain.model))


def test_dro_pulls_samples_without_advantage_too() -> None:
    batch = [replace(t, reward=1.0) if t.group < 2 else t for t in trajectories(5)]
    options: dict[str, Any] = {"loss": "dro", "dro_beta": 0.5, "old_logprobs": "behaviour"}
    found = learner(**options)
    assert found.train(batch, step=0, policy_version=3)["samples_computed"] == 16
    torch.testing.assert_close(trained(batch, **options), trained(batch, skip_zero_advantage=False, **options))


def test_old_logprobs_may_be_those_of_the_behaviour_policy() -> None:
    found = learner(loss="vanilla", old_logprobs="behaviour").train(trajectories(4), step=0, policy_version=3)
    assert found["ratio_max"] > 2
    assert found["importance_ratio_max"] == 1.0


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "remax"])  # in test_baselines.py
def test_every_estimator_trains(name: str) -> None:
    found = learner(adv_estimator=name, gdpo_weights={"exact": 1.0, "exact/form": 0.5} if name == "gdpo" else {})
    before = weights(found.model)
    for step in range(2):
        told = found.train(trajectories(step, masked=step == 1), step=step, policy_version=3)
        assert told["updates"] == 1
        assert told["grad_norm"] > 0
        assert all(np.isfinite(value) for value in told.values())
        before, last = weights(found.model), before
        assert (before - last).abs().max() > 1e-3


def test_the_parts_of_the_reward_must_be_there_for_gdpo_and_are_reported() -> None:
    found = learner(adv_estimator="gdpo", gdpo_weights={"exact": 1.0, "exact/form": 0.5})
    told = found.train(trajectories(0), step=0, policy_version=3)
    assert told["reward_mean/exact"] == pytest.approx(15 / 16)
    assert told["reward_mean/exact/form"] == 1 / 2
    for parts, message in (
        ({"exact": 1.0}, "trajectory s3: gdpo_weights asks for part 'exact/form' of the reward, which has: exact$"),
        ({}, "which has: no breakdown at all"),
        ({"exact": 1.0, "exact/form": 1e300}, "trajectory s3: part 'exact/form' of the reward is not finite"),
    ):
        batch = [replace(t, reward_parts=parts) if t.sample == "s3" else t for t in trajectories(0)]
        with pytest.raises(ValueError, match=message):
            found.train(batch, step=1, policy_version=3)


@pytest.mark.parametrize(
    "options", [{}, {"loss": "vanilla"}, {"loss": "vanilla", "correction": {"weights": "token", "weight_max": 1.5}}]
)
def test_the_token_baseline_takes_scores_of_its_own_weights_and_the_weights_of_the_loss(
    options: dict[str, Any],
) -> None:
    """One group; the learner's advantages against the estimator on scores that are computed sample by sample."""
    batch = trajectories(3, groups=1, group_size=3)
    found = learner(dtype=torch.float64, adv_estimator="optimal_token_baseline", **options)
    width = max(len(t.response_ids) for t in batch)
    logprobs_BR, squares_BR, behaviour_BR, rewards_BR, mask_BR = torch.zeros(5, len(batch), width)
    for row, t in enumerate(batch):
        length = len(t.response_ids)
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
        with torch.no_grad():
            full = torch.log_softmax(found.model(input_ids=ids[None]).logits[0, len(t.prompt_ids) - 1 : -1], -1)
        logprobs_BR[row, :length] = full[torch.arange(length), ids[len(t.prompt_ids) :]]
        squares_BR[row, :length] = full.exp().square().sum(-1)
        behaviour_BR[row, :length] = torch.from_numpy(t.behaviour_logprobs)
        rewards_BR[row, length - 1], mask_BR[row, :length] = t.reward, 1
    cap = 1.5 if "correction" in options else 2.0
    weights_BR = (logprobs_BR - behaviour_BR).exp().clamp(max=cap) if options != {"loss": "vanilla"} else None
    expected = ESTIMATORS["optimal_token_baseline"](
        AdvantageInputs(
            token_rewards_BR=rewards_BR,
            mask_BR=mask_BR,
            group_B=torch.zeros(len(batch), dtype=torch.int64),
            logprobs_BR=logprobs_BR,
            square_sums_BR=squares_BR,
            importance_weights_BR=weights_BR,
        ),
        AdvantageOptions(),
    ).advantages_BR
    prepared = found._prepare(batch, step=0, policy_version=3, kl_coef=0.0)
    torch.testing.assert_close(prepared.advantages_BR, expected, rtol=0, atol=1e-5)


def test_a_poisoned_update_is_skipped_and_counted() -> None:
    found = learner()
    with torch.no_grad():
        next(found.model.parameters())[0, 0] = float("nan")
    before = weights(found.model)
    told = found.train(trajectories(0), step=0, policy_version=3)
    assert (told["skipped"], told["updates"]) == (1, 0)
    assert torch.equal(weights(found.model).nan_to_num(), before.nan_to_num())


def test_the_metrics_say_what_the_batch_was() -> None:
    batch = [replace(t, reward=float(i % 2) if t.group else 1.0) for i, t in enumerate(trajectories(0))]
    told = learner().train(batch, step=7, policy_version=5)
    lengths = [len(t.response_ids) for t in batch]
    expected = {
        "step": 7,
        "reward_mean": (4 + 6) / 16,
        "groups_equal_reward_share": 1 / 4,
        "response_length_mean": np.mean(lengths),
        "truncation_rate": 1 / 4,
        "staleness_max": 4,
        "staleness_mean": 3,
        "staleness_count_2": 8,
        "tokens": sum(lengths),
        "samples_computed": 12,
        "ratio_mean": 1.0,
        "lr": 1e-2,
    }
    assert {name: told[name] for name in expected} == pytest.approx(expected)
    assert 0 < told["ess"] <= 1
    assert told["logprob_diff_mean"] < told["logprob_diff_p99"] <= told["logprob_diff_max"]
    names = {"loss", "policy_loss", "kl", "entropy", "grad_norm", "clip_fraction_dual", "importance_ratio_max"}
    assert names <= told.keys()


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    plain = learner()
    config = plain.config.model_copy(update={"gradient_checkpointing": True})
    recomputing = Learner(tiny_model(), config)
    for run in (plain, recomputing):
        run.train(trajectories(0), step=0, policy_version=3)
    torch.testing.assert_close(weights(recomputing.model), weights(plain.model), rtol=0, atol=1e-6)


def test_an_empty_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one trajectory"):
        learner().train([], step=0, policy_version=0)
