"""Supervised training against plain torch, and what must not change its gradient. B rows, T tokens, V vocabulary."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.unit.trainer.test_step import tiny_model, weights
from trainer.config import TrainerConfig
from trainer.configs.update import OptimizerConfig
from trainer.supervised.batch import Example, collate_examples
from trainer.supervised.step import SupervisedLearner

LENGTHS = ((3, 1), (1, 5), (6, 2), (2, 7), (4, 4))
"""Prompt and response tokens."""
torch.set_num_threads(1)


def examples(seed: int = 0) -> list[Example]:
    draw = np.random.default_rng(seed)
    return [
        Example(
            key=f"row/{number}",
            prompt_ids=draw.integers(1, 16, size=prompt, dtype=np.int32),
            response_ids=draw.integers(1, 16, size=response, dtype=np.int32),
        )
        for number, (prompt, response) in enumerate(LENGTHS)
    ]


def learner(*, dtype: torch.dtype = torch.float64, optimizer: dict[str, Any] | None = None, **config: Any) -> Any:
    told = TrainerConfig(
        model="tiny",
        device="cpu",
        **{"max_tokens_per_microbatch": 1000} | config,
        optimizer=OptimizerConfig(**{"lr": 1e-2, "weight_decay": 0.0, "max_grad_norm": None} | (optimizer or {})),
    )
    return SupervisedLearner(tiny_model(dtype=dtype), told)


def padded_loss(model: nn.Module, rows: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Cross-entropy by torch over one padded batch, and its logits at the response tokens."""
    width = max(row.length for row in rows)
    tokens_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    labels_BT = torch.full_like(tokens_BT, -100)
    for index, row in enumerate(rows):
        tokens_BT[index, : row.length] = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))
        labels_BT[index, len(row.prompt_ids) : row.length] = torch.from_numpy(row.response_ids.astype(np.int64))
    logits_BTV = model(input_ids=tokens_BT, attention_mask=(torch.arange(width) < width)[None].long()).logits
    flat_NV, labels_N = logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten()
    loss = cross_entropy(flat_NV, labels_N, ignore_index=-100)
    return loss, flat_NV[labels_N != -100].argmax(-1) == labels_N[labels_N != -100]


def test_an_update_is_that_of_plain_cross_entropy_over_the_response_tokens() -> None:
    own, plain, rows = learner(), tiny_model(dtype=torch.float64), examples()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        loss, _ = padded_loss(plain, rows)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.get_total_norm([one.grad for one in plain.parameters() if one.grad is not None])
        optimizer.step()

        metrics = own.learn(rows)

        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
        assert (metrics["samples"], metrics["response_tokens"], metrics["tokens"]) == (5.0, 19.0, 35.0)
    torch.testing.assert_close(weights(own.model), weights(plain), rtol=0, atol=1e-11)


@pytest.mark.parametrize("max_tokens", [1, 9, 20])
def test_the_split_into_micro_batches_changes_nothing(max_tokens: int) -> None:
    whole, split = learner(), learner(max_tokens_per_microbatch=max_tokens)
    for seed in range(2):
        together, apart = whole.learn(examples(seed)), split.learn(examples(seed))
        assert apart["loss"] == pytest.approx(together["loss"], rel=1e-12)
        assert apart["grad_norm"] == pytest.approx(together["grad_norm"], rel=1e-9)
    torch.testing.assert_close(weights(split.model), weights(whole.model), rtol=0, atol=1e-11)


def test_held_out_rows_are_judged_by_loss_and_by_what_greedy_decoding_takes() -> None:
    own, rows = learner(max_tokens_per_microbatch=9), examples()
    for _ in range(4):
        own.learn(rows)
    before = weights(own.model).clone()
    loss, hits_N = padded_loss(own.model, rows)

    judged = own.judge(rows)

    assert judged["held_out_loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert judged["held_out_token_accuracy"] == pytest.approx(float(hits_N.double().mean()))
    assert 0 < judged["held_out_token_accuracy"] < 1, "both kinds of tokens are there"
    assert torch.equal(weights(own.model), before)


def test_the_learning_rate_follows_its_schedule() -> None:
    own = learner(optimizer={"warmup_steps": 2, "schedule": "linear", "total_steps": 4})
    assert [own.learn(examples())["lr"] for _ in range(5)] == pytest.approx([0.0, 0.005, 0.01, 0.005, 0.0])


def test_an_update_that_is_not_finite_is_left_out_and_its_rows_are_named() -> None:
    own, rows = learner(max_tokens_per_microbatch=1, guards={"max_skips_in_a_row": 2}), examples()
    embedding = own.model.get_input_embeddings().weight
    rows[1] = Example(key="bad", prompt_ids=np.array([16], np.int32), response_ids=rows[1].response_ids)
    with torch.no_grad():
        embedding[16] = float("nan")  # of a tied head, too: every logprob is then not a number
    before = weights(own.model).clone()

    assert own.learn(rows)["skipped"] == 1.0
    assert own.guards.stop_reason == ""
    own.learn(rows)

    torch.testing.assert_close(weights(own.model), before, rtol=0, atol=0, equal_nan=True)
    assert "bad" in own.guards.skips[0].suspects and "2 updates in a row" in own.guards.stop_reason


def test_a_batch_of_examples_has_a_mask_of_all_response_tokens() -> None:
    batch = collate_examples(examples())
    assert batch.lengths_B.tolist() == [4, 6, 8, 9, 8]
    assert batch.mask_BR.sum(-1).tolist() == [1, 5, 2, 7, 4]
    assert batch.input_ids_BT.shape == (5, 9)


def test_an_example_without_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="row/1: 0 prompt and 2 response tokens"):
        Example(key="row/1", prompt_ids=np.zeros(0, np.int32), response_ids=np.ones(2, np.int32))
