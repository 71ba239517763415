"""Continuous batching of a Hugging Face causal LM, one iteration at a time and without threads.

    submit -> waiting -> (free rows) prefill, first token -> rows -> decode one token each -> ... -> completion

A prompt that several admitted samples share is prefilled once. Samples join and leave between any two tokens; weights
change between any two tokens. The same calls in the same order give bit-identical results.

Shapes: P distinct prompts of an admission, B rows, T KV positions, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.engine import Completion, Request, UpdateMode
from rollout.engines.hf_attention import group_query_heads
from rollout.engines.hf_cache import SlotCache
from rollout.engines.hf_prefill import Prefill
from rollout.engines.hf_rows import Row, RowTable
from rollout.engines.hf_weights import Weights
from rollout.sampling import StopReason, sample, uniforms

Decode = Callable[[list[list[int]]], list[str]]


class HfCore:
    """A model, its KV slots and its samples. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Iterable[int],
        decode: Decode | None,
        max_num_seqs: int,
        max_model_len: int,
        max_prefill_tokens: int,
    ) -> None:
        self.model = model.eval()
        self.policy_version = 0
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        group_query_heads(model)
        self._weights = Weights(model)
        self._decode_text = decode
        self._max_num_seqs = max_num_seqs
        self._cache = SlotCache(model.config.num_hidden_layers, max_slots=max_num_seqs, max_length=max_model_len)
        self._prefill = Prefill(model, cache=self._cache, max_tokens=max_prefill_tokens)
        self._table = RowTable(max_rows=max_num_seqs, device=self.device)
        self._waiting: deque[Row] = deque()
        self._arrivals = 0
        self._asleep = False
        self._is_eos_V = torch.zeros(model.get_input_embeddings().num_embeddings, dtype=torch.bool, device=self.device)
        self._is_eos_V[[token for token in eos_ids if token < len(self._is_eos_V)]] = True

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return not self._asleep and bool(self._waiting or self._table.rows)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests that `check_request` has passed."""
        for request in requests:
            self._waiting.append(Row(request=request, arrival=self._arrivals))
            self._arrivals += 1

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit what fits, then one token for every row. Returns the samples that ended."""
        done = self._admit()
        if self._table.rows:
            self._sample(self._decode_logits(), first=0)
            done += self._collect(0)
        return done

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[int]) -> list[Completion]:
        """End these samples, waiting or under way; ids that are unknown are ignored."""
        ids = frozenset(request_ids)
        never_begun = [row for row in self._waiting if row.request.request_id in ids]
        self._waiting = deque(row for row in self._waiting if row.request.request_id not in ids)
        which = [at for at, row in enumerate(self._table.rows) if row.request.request_id in ids]
        done = self._release(np.array(which, dtype=np.int64), reasons=[StopReason.ABORTED] * len(which))
        return done + [_nothing(row.request) for row in never_begun]

    @torch.inference_mode()
    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]], mode: UpdateMode) -> None:
        """See `rollout.engine.Engine.load_weights`."""
        self._weights.copy_(tensors)
        self.policy_version = version
        if mode == "restart":
            self._restart()
            return
        for row, count in zip(self._table.rows, self._table.columns["count"].tolist(), strict=False):
            row.begin_version(version, at=count)
        if mode == "recompute" and self._table.rows:
            self._recompute()

    def sleep(self) -> None:
        """Bring the model to the CPU and give the memory of device and KV slots back; samples keep their tokens."""
        self._asleep = True
        self._cache.release()
        self.model.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring the model back; samples under way are prefilled again."""
        if not self._asleep:
            return
        self.model.to(self.device)
        self._asleep = False
        if self._table.rows:
            with torch.inference_mode():
                self._recompute()

    def parameters(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of each parameter; tied ones once."""
        return self._weights.describe()

    def _admit(self) -> list[Completion]:
        free = self._max_num_seqs - len(self._table)
        # Small admissions would cost a prefill pass each: wait until an eighth of the rows is free.
        if not self._waiting or free < min(len(self._waiting), max(1, self._max_num_seqs // 8)):
            return []
        first = len(self._table)
        if first == 0:
            self._cache.forget()
        rows = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        for row in rows:
            row.begin_version(self.policy_version, at=0)
        self._table.append(rows)
        self._sample(self._prefill_prompts(rows, first=first), first=first)
        return self._collect(first)

    def _prefill_prompts(self, rows: list[Row], *, first: int) -> Tensor:
        """Prefill each distinct prompt once, fill the slots from `first` on; logits after the prompt, (B, V)."""
        place_of: dict[tuple[int, ...] | bytes, int] = {}
        prompts: list[npt.NDArray[np.int64]] = []
        source = []
        for row in rows:
            ids = row.request.prompt_ids
            place = place_of.setdefault(ids if isinstance(ids, tuple) else ids.tobytes(), len(prompts))
            if place == len(prompts):
                prompts.append(np.asarray(ids, dtype=np.int64))
            source.append(place)
        source_B = np.array(source)
        logits_PV = self._prefill.run(prompts, source_B=source_B, first=first)
        return logits_PV[self._device_copy(source_B)]

    def _decode_logits(self) -> Tensor:
        """Feed the last token of every row; logits of the next, (B, V)."""
        num_rows = len(self._table)
        position = self._table.columns["position"][:num_rows]
        length = int(position.max()) + 1
        position_B = torch.from_numpy(position.copy()).to(self.device)
        visible = self._cache.begin_decode(position_B, length=length)
        beyond_BT = torch.arange(visible, device=self.device) > position_B[:, None]
        mask_BT = torch.zeros(beyond_BT.shape, dtype=self.dtype, device=self.device)
        mask_BT.masked_fill_(beyond_BT, torch.finfo(self.dtype).min)
        output = self.model(
            input_ids=self._table.last_R[:num_rows, None],
            attention_mask=mask_BT[:, None, None],
            position_ids=position_B[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        position += 1
        logits: Tensor = output.logits[:, -1]
        return logits

    def _sample(self, logits_BV: Tensor, *, first: int) -> None:
        """Draw the next token of the rows from `first` on."""
        block = self._table.columns[first : first + logits_BV.shape[0]]
        index_B = self._device_copy(block["count"])
        uniform_B = uniforms(self._device_copy(block["seed"]), index_B=index_B)
        filters = bool(block["filters"].any())
        temperature = block["temperature"]
        token_B, logprob_B = sample(
            logits_BV,
            uniform_B=uniform_B,
            temperature=float(temperature[0])
            if (temperature == temperature[0]).all()
            else self._device_copy(temperature),
            top_k_B=self._device_copy(block["top_k"]) if filters else None,
            top_p_B=self._device_copy(block["top_p"]) if filters else None,
        )
        self._table.record(first, index_B=index_B, token_B=token_B, logprob_B=logprob_B)

    def _collect(self, first: int) -> list[Completion]:
        """Take out the rows, from `first` on, whose last token ended them."""
        block = self._table.columns[first : len(self._table)]
        hit_eos = self._is_eos_V[self._table.last_R[first : len(self._table)]].cpu().numpy() & ~block["ignore_eos"]
        hit_length = block["count"] >= block["limit"]
        hit_stop = self._hit_stop(first, candidate=block["stops"] & ~hit_eos)
        which = np.flatnonzero(hit_eos | hit_stop | hit_length)
        if len(which) == 0:
            return []
        reasons = [
            StopReason.EOS if hit_eos[at] else StopReason.STOP if hit_stop[at] else StopReason.LENGTH for at in which
        ]
        return self._release(which + first, reasons=reasons)

    def _hit_stop(self, first: int, *, candidate: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which rows have just completed a stop string."""
        hit = np.zeros_like(candidate)
        which = np.flatnonzero(candidate)
        if len(which) == 0:
            return hit
        assert self._decode_text is not None, "submit refuses stop strings without a tokenizer"
        stops = [self._table.rows[first + at].request.sampling.stop for at in which]
        # A token holds at least one byte, so a stop string of n bytes lies in the last n tokens; a few more for
        # special tokens, which decode to nothing.
        length = max(len(one.encode()) for stop in stops for one in stop) + 8
        texts = self._decode_text(self._table.tails(which + first, length=length))
        hit[which] = [any(one in text for one in stop) for text, stop in zip(texts, stops, strict=True)]
        return hit

    def _release(self, which: npt.NDArray[np.int64], *, reasons: list[StopReason]) -> list[Completion]:
        if len(which) == 0:
            return []
        done = self._table.completions(which, reasons=reasons)
        source, target = self._table.remove(which)
        if len(target):
            self._cache.move(
                self._device_copy(source),
                target_B=self._device_copy(target),
                length=int(self._table.columns["position"][target].max()),
            )
        return done

    def _recompute(self) -> None:
        rows = range(len(self._table))
        self._prefill.run([self._table.sequence(row) for row in rows], source_B=np.arange(len(rows)), first=0)

    def _restart(self) -> None:
        rows = sorted(self._table.rows, key=lambda row: row.arrival)
        self._waiting.extendleft(Row(request=row.request, arrival=row.arrival) for row in reversed(rows))
        self._table.rows.clear()

    def _device_copy(self, column: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(column.copy()).to(self.device)


def _nothing(request: Request) -> Completion:
    return Completion(
        request_id=request.request_id,
        token_ids=np.zeros(0, dtype=np.int32),
        logprobs=np.zeros(0, dtype=np.float32),
        spans=(),
        stop_reason=StopReason.ABORTED,
        text=None,
    )
