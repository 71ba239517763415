"""The samples under way, packed in rows 0..num_rows-1: their counters on the host, their tokens on the device.

Nothing here works token by token in Python: a step writes one column for all rows, and lists are made only when a
sample ends. Shapes: R rows, M longest response so far, B rows touched by one call.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollout.engine import Completion, Request
from rollout.sampling import StopReason, VersionSpan

COLUMNS = np.dtype(
    [
        ("arrival", np.int64),  # order of submission
        ("position", np.int64),  # KV entries written = position of the token that is fed next
        ("count", np.int64),  # tokens generated
        ("limit", np.int64),  # max_tokens
        ("seed", np.int64),  # two's complement of the 64-bit seed
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("filters", np.bool_),
        ("ignore_eos", np.bool_),
        ("stops", np.bool_),  # has stop strings
    ]
)


@dataclass(slots=True)
class Row:
    """What of a sample does not fit a column: its request and where, in its tokens, each policy_version began."""

    request: Request
    arrival: int
    starts: list[tuple[int, int]] = field(default_factory=list)  # (policy_version, index of its first token)

    def begin_version(self, version: int, *, at: int) -> None:
        if self.starts and self.starts[-1][1] == at:
            self.starts.pop()
        self.starts.append((version, at))

    def spans(self, num_tokens: int) -> tuple[VersionSpan, ...]:
        if len(self.starts) == 1:
            return (VersionSpan(policy_version=self.starts[0][0], num_tokens=num_tokens),)
        ends = [at for _, at in self.starts[1:]] + [num_tokens]
        return tuple(
            VersionSpan(policy_version=version, num_tokens=end - at)
            for (version, at), end in zip(self.starts, ends, strict=True)
            if end > at
        )


class RowTable:
    """Rows of samples under way. Freed rows are filled from the end, so that the rows stay packed."""

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self.rows: list[Row] = []
        self.device = device
        self.columns = np.zeros(max_rows, dtype=COLUMNS)
        self.last_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.token_RM = torch.zeros((max_rows, 16), dtype=torch.int32, device=device)
        self.logprob_RM = torch.zeros((max_rows, 16), dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return len(self.rows)

    def append(self, rows: list[Row]) -> None:
        """Rows of new samples, with no token yet and the whole prompt as position."""
        first, last = len(self.rows), len(self.rows) + len(rows)
        self.rows += rows
        params = [row.request.sampling for row in rows]
        block = self.columns[first:last]
        block["arrival"] = [row.arrival for row in rows]
        block["position"] = [len(row.request.prompt_ids) for row in rows]
        block["count"] = 0
        block["limit"] = [one.max_tokens for one in params]
        block["seed"] = np.array([row.request.seed for row in rows], dtype=np.uint64).view(np.int64)
        block["temperature"] = [one.temperature for one in params]
        block["top_k"] = [one.top_k for one in params]
        block["top_p"] = [one.top_p for one in params]
        block["filters"] = [one.filters for one in params]
        block["ignore_eos"] = [one.ignore_eos for one in params]
        block["stops"] = [bool(one.stop) for one in params]
        self._reserve(int(block["limit"].max()))

    def record(self, first: int, *, index_B: Tensor, token_B: Tensor, logprob_B: Tensor) -> None:
        """One new token for each of the rows from `first` on; index_B is its place in the response."""
        last = first + token_B.shape[0]
        row_B = torch.arange(first, last, device=self.device)
        self.last_R[first:last] = token_B
        self.token_RM[row_B, index_B] = token_B.to(torch.int32)
        self.logprob_RM[row_B, index_B] = logprob_B
        self.columns["count"][first:last] += 1

    def remove(self, freed: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Drop rows (ascending) and fill the holes from the end: returns (source rows, target rows) of the moves."""
        kept = len(self.rows) - len(freed)
        target = freed[freed < kept]
        source = np.setdiff1d(np.arange(kept, len(self.rows)), freed, assume_unique=True)
        for to, origin in zip(target.tolist(), source.tolist(), strict=True):
            self.rows[to] = self.rows[origin]
        del self.rows[kept:]
        if len(target):
            self.columns[target] = self.columns[source]
            for store in (self.last_R, self.token_RM, self.logprob_RM):
                store[torch.from_numpy(target)] = store[torch.from_numpy(source)]
        return source, target

    def completions(self, which: npt.NDArray[np.int64], *, reasons: list[StopReason]) -> list[Completion]:
        """What these rows have become, without text. RuntimeError where logits were not finite."""
        if len(which) == 0:
            return []
        counts = self.columns["count"][which].tolist()
        index_B = torch.from_numpy(which).to(self.device)
        longest = max(counts)
        tokens = self.token_RM[index_B, :longest].cpu().numpy()
        logprobs = self.logprob_RM[index_B, :longest].cpu().numpy()
        within = np.arange(longest) < np.array(counts)[:, None]
        if not np.isfinite(logprobs[within]).all():
            raise RuntimeError("the model gave logits that are not finite")
        return [
            Completion(
                request_id=self.rows[row].request.request_id,
                token_ids=tokens[place, :count].copy(),
                logprobs=logprobs[place, :count].copy(),
                spans=self.rows[row].spans(count),
                stop_reason=reason,
                text=None,
            )
            for place, (row, count, reason) in enumerate(zip(which.tolist(), counts, reasons, strict=True))
        ]

    def tails(self, which: npt.NDArray[np.int64], *, length: int) -> list[list[int]]:
        """The last `length` tokens (or fewer) of these rows."""
        counts = self.columns["count"][which].tolist()
        return [
            self.token_RM[row, max(0, count - length) : count].tolist()
            for row, count in zip(which.tolist(), counts, strict=True)
        ]

    def sequence(self, row: int) -> npt.NDArray[np.int64]:
        """Prompt and response of a row as far as its KV entries go: all but the token that is fed next."""
        count = int(self.columns["count"][row])
        response = self.token_RM[row, : count - 1].cpu().numpy()
        return np.concatenate([np.asarray(self.rows[row].request.prompt_ids), response]).astype(np.int64)

    def _reserve(self, num_tokens: int) -> None:
        have = self.token_RM.shape[1]
        if num_tokens > have:
            more = (0, max(2 * have, num_tokens) - have)
            self.token_RM = torch.nn.functional.pad(self.token_RM, more)
            self.logprob_RM = torch.nn.functional.pad(self.logprob_RM, more)
