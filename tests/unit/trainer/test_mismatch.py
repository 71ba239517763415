"""The differences between servers and trainer: which tokens are compared, and with which weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.trainer.test_step import learner, tiny_model, trajectories
from trainer.batch import Trajectory
from trainer.guarding.mismatch import Mismatch, mismatches

VERSION = 3


def exact_logprobs(model: nn.Module, t: Trajectory) -> np.ndarray[Any, np.dtype[np.float32]]:
    ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, len(t.prompt_ids) - 1 : -1]
    found: np.ndarray[Any, np.dtype[np.float32]] = logits.log_softmax(-1)[
        torch.arange(len(t.response_ids)), ids[len(t.prompt_ids) :]
    ].numpy()
    return found


def fleet(offsets: dict[str, float], *, masked: bool = False) -> list[Trajectory]:
    """A batch whose servers give the logprobs of the model that the learner begins with, plus an offset each."""
    model, names = tiny_model(), list(offsets)
    made = []
    for index, t in enumerate(trajectories(1, masked=masked)):
        server = names[index % len(names)]
        logprobs = exact_logprobs(model, t) + np.float32(offsets[server])
        made.append(replace(t, server=server, behaviour_logprobs=logprobs, spans=((VERSION, len(t.response_ids)),)))
    return made


def made_by(server: str, spans: tuple[tuple[int, int], ...]) -> Trajectory:
    length = sum(tokens for _, tokens in spans)
    return Trajectory(
        sample="s",
        group=0,
        prompt_ids=np.zeros(1, np.int32),
        response_ids=np.zeros(length, np.int32),
        behaviour_logprobs=np.zeros(length, np.float32),
        reward=0.0,
        spans=spans,
        stop_reason="stop",
        server=server,
    )


def by_server(found: Sequence[Mismatch]) -> dict[str, float]:
    assert all(one.staleness == 0 for one in found)
    return {one.server: one.mean for one in found}


def test_tokens_are_counted_by_server_and_staleness() -> None:
    rows_N = torch.tensor([0, 0, 1, 2, 3])
    differences_N = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    spans = [((2, 2),), ((3, 1),), ((2, 1),), ((2, 1), (3, 1))]
    batch = [made_by(server, span) for server, span in zip(("a", "a", "b", "a"), spans, strict=True)]
    found = mismatches(rows_N, differences_N, batch, policy_version=VERSION)
    assert [(cell.server, cell.staleness, cell.num_tokens) for cell in found] == [("a", 0, 1), ("a", 1, 3), ("b", 1, 1)]
    assert [cell.mean for cell in found] == pytest.approx([0.5, (0.1 + 0.3 + 0.9) / 3, 0.7])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"epochs": 3, "minibatches": 2, "lr": 0.5},
        {"loss": "vanilla", "old_logprobs": "behaviour", "epochs": 2, "lr": 0.5},
        {"kl_use": "reward", "kl_coef": 0.1},
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_servers_are_compared_with_the_weights_before_the_step_however_many_updates_it_makes(
    options: dict[str, Any], masked: bool
) -> None:
    found = learner(**options)
    batch = fleet({"honest": 0.0, "liar": -0.5}, masked=masked)
    metrics = found.train(batch, step=4, policy_version=VERSION)
    assert by_server(found.mismatches) == pytest.approx({"honest": 0.0, "liar": 0.5}, abs=1e-5)
    assert sum(one.num_tokens for one in found.mismatches) == metrics["tokens"]


def test_with_behaviour_logprobs_as_the_old_ones_only_the_first_minibatch_can_be_compared() -> None:
    found = learner(loss="vanilla", old_logprobs="behaviour", minibatches=4, lr=0.5)
    batch = fleet({"honest": 0.0, "liar": -0.5})
    found.train(batch, step=4, policy_version=VERSION)
    assert by_server(found.mismatches) == pytest.approx({"honest": 0.0, "liar": 0.5}, abs=1e-5)
    assert sum(one.num_tokens for one in found.mismatches) == sum(len(t.response_ids) for t in batch[:4])


def test_samples_that_are_not_computed_are_not_compared() -> None:
    found = learner()
    batch = [replace(t, reward=1.0 if t.group == 0 else t.reward) for t in fleet({"a": -0.25})]
    found.train(batch, step=4, policy_version=VERSION)
    assert [one.num_tokens for one in found.mismatches] == [sum(len(t.response_ids) for t in batch[4:])]
    found.train([replace(t, reward=1.0) for t in batch], step=5, policy_version=VERSION)
    assert found.mismatches == []
