"""Trajectories as the trainer takes them, and their collation into one padded batch on the CPU.

Dimensions: B samples, T prompt + response tokens (right-padded), R response tokens (left-aligned, right-padded).
Padding needs no attention mask: attention is causal and padding stands to the right of every token that counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished sample with p prompt and n response tokens.

    Raises ValueError when the parts do not fit each other: such a sample is to be dropped and counted by the caller.
    """

    sample: str
    """Key of the sample, unique in the batch."""
    group: int
    """Samples of one prompt share this number."""
    prompt_ids: npt.NDArray[np.int32]
    """[p], p >= 1."""
    response_ids: npt.NDArray[np.int32]
    """[n], n >= 1, stop token included."""
    behaviour_logprobs: npt.NDArray[np.float32]
    """[n], nats, under the sampling distribution."""
    loss_mask: npt.NDArray[np.uint8] | None = None
    """[n], 1 where the policy made the token; None: everywhere."""
    reward: float
    """Scalar reward of the whole response."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of, by name; not weighted."""
    reference_logprobs: npt.NDArray[np.float32] | None = None
    """[n], nats, under the reference policy."""
    spans: tuple[tuple[int, int], ...]
    """Run-length pairs (policy_version, number of tokens); they sum to n."""
    stop_reason: str
    """"length" where the token limit cut the response."""
    server: str = ""
    """Name of the rollout server that made it."""
    baseline: bool = False
    """Greedy: its reward is the baseline of its group, and it is not trained on."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ValueError(f"trajectory {self.sample}: {problem}")

    def _problem(self) -> str | None:
        length = len(self.response_ids)
        if not len(self.prompt_ids) or not length:
            return f"empty prompt or response ({len(self.prompt_ids)} and {length} tokens)"
        for name in ("behaviour_logprobs", "loss_mask", "reference_logprobs"):
            values = getattr(self, name)
            if values is not None and values.shape != (length,):
                return f"{name} has shape {values.shape} for {length} response tokens"
            if values is not None and not np.isfinite(values).all():
                return f"{name} is not finite"
        if not np.isfinite(self.reward):
            return f"reward is {self.reward}"
        if sum(tokens for _, tokens in self.spans) != length:
            return f"spans {self.spans} do not cover {length} response tokens"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Collated trajectories; float tensors are float32, the mask is 1.0 where a response token counts in the loss."""

    input_ids_BT: Tensor
    prompt_lengths_B: Tensor
    response_lengths_B: Tensor
    mask_BR: Tensor
    behaviour_logprobs_BR: Tensor
    reference_logprobs_BR: Tensor | None
    rewards_B: Tensor
    group_B: Tensor
    weights_BR: Tensor | None = None
    """Factor of every per-token policy loss, once the step has corrected the batch; None: 1."""

    @property
    def size(self) -> int:
        """Number of samples, B."""
        return len(self.rewards_B)

    @property
    def lengths_B(self) -> Tensor:
        """Prompt plus response tokens of each sample."""
        return self.prompt_lengths_B + self.response_lengths_B

    def take(self, rows_B: Tensor) -> "Batch":
        """These samples in this order; a row may come several times."""
        held = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(self, **{name: part[rows_B] for name, part in held.items() if part is not None})


def collate(trajectories: Sequence[Trajectory]) -> Batch:
    """Pads B trajectories into one `Batch`; reference logprobs are kept only when every trajectory has them.

    Raises ValueError on an empty sequence.
    """
    if not trajectories:
        raise ValueError("a batch needs at least one trajectory")
    prompts = np.array([len(t.prompt_ids) for t in trajectories])
    responses = np.array([len(t.response_ids) for t in trajectories])
    tokens = [part for t in trajectories for part in (t.prompt_ids, t.response_ids)]
    masks = [np.ones(len(t.response_ids), np.uint8) if t.loss_mask is None else t.loss_mask for t in trajectories]
    references = [t.reference_logprobs for t in trajectories if t.reference_logprobs is not None]
    complete = len(references) == len(trajectories)
    return Batch(
        input_ids_BT=pad(tokens, prompts + responses, np.int64),
        prompt_lengths_B=torch.from_numpy(prompts),
        response_lengths_B=torch.from_numpy(responses),
        mask_BR=pad(masks, responses, np.float32),
        behaviour_logprobs_BR=pad([t.behaviour_logprobs for t in trajectories], responses, np.float32),
        reference_logprobs_BR=pad(references, responses, np.float32) if complete else None,
        rewards_B=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        group_B=torch.tensor([t.group for t in trajectories], dtype=torch.int64),
    )


def pad(parts: Sequence[npt.NDArray[np.generic]], lengths: npt.NDArray[np.int64], dtype: npt.DTypeLike) -> Tensor:
    """Concatenated rows of the given lengths -> [B, max length], zero on the right."""
    rows = np.zeros((len(lengths), int(lengths.max())), dtype=dtype)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = np.concatenate(parts)
    return torch.from_numpy(rows)
