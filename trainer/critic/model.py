"""The value model of PPO: a transformer body with a linear head, which says what reward is still to come.

Dimensions: T tokens, N chosen positions among them, D hidden size.
"""

import json
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformers import PreTrainedModel

from trainer.attention.packed import sequence_arguments
from trainer.config import TrainerConfig
from trainer.configs.critic import CriticConfig
from trainer.model.load import load_model, model_folder
from trainer.packing import PackedTokens


class ValueModel(nn.Module):
    """One value at each chosen position of packed samples: of the state before the token that is predicted there."""

    def __init__(self, causal_lm: nn.Module, config: CriticConfig, *, seed: int) -> None:
        """Takes the body of `causal_lm` for its own and leaves the output head; `seed` is of the value head."""
        super().__init__()
        whole = cast(PreTrainedModel, causal_lm)
        self.body: PreTrainedModel = whole.base_model
        embedding = self.body.get_input_embeddings().weight
        size = int(self.body.config.get_text_config().hidden_size)
        self.head = skip_init(  # type: ignore[no-untyped-call]
            nn.Linear, size, 1, device=embedding.device, dtype=embedding.dtype
        )
        drawn_1D = torch.randn(1, size, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.head.weight.copy_(config.head_init * drawn_1D)
            self.head.bias.zero_()
        self._bound = config.bound
        self._attention = str(whole.config._attn_implementation)

    def forward(self, tokens: PackedTokens) -> Tensor:
        """Values [N] at `positions_N`, float32 at least."""
        told = sequence_arguments(tokens.cu_seqlens, tokens.max_length, attn_implementation=self._attention)
        found = self.body(input_ids=tokens.input_ids_1T, position_ids=tokens.position_ids_1T, **told)
        hidden_ND = found.last_hidden_state[0].index_select(0, tokens.positions_N)
        raw_N = self.head(hidden_ND).squeeze(-1)
        raw_N = raw_N.to(torch.promote_types(raw_N.dtype, torch.float32))
        return raw_N if self._bound is None else self._bound * torch.tanh(raw_N / self._bound)


def load_critic(config: TrainerConfig, *, device: str) -> ValueModel | None:
    """The critic as a run begins with it, where there is one.

    Raises ValueError where its body has another vocabulary than the policy, and as `load_model` does.
    """
    critic = config.critic
    if critic is None:
        return None
    if critic.model is not None and _vocabulary(critic.model) != _vocabulary(config.model):
        raise ValueError(f"trainer.critic.model={critic.model!r} has another vocabulary than {config.model!r}")
    causal_lm = load_model(
        critic.model or config.model,
        dtype=config.dtype,
        attn_implementation=config.attn_implementation,
        device=device,
    )
    return ValueModel(causal_lm, critic, seed=config.seed)


def _vocabulary(path: str) -> object:
    """Token -> id by tokenizer.json, or the content of older vocabulary files."""
    folder = model_folder(path)
    if (folder / "tokenizer.json").is_file():
        return json.loads((folder / "tokenizer.json").read_bytes())["model"].get("vocab")
    older = (folder / name for name in ("vocab.json", "vocab.txt", "tokenizer.model"))
    return {file.name: file.read_bytes() for file in older if file.is_file()}
