"""What a learner has to save: parts, each with its tensors by name. A further model is a further entry here.

model            weights of the policy; with LoRA adapter_model, as PEFT names them
optimizer        its moments, `layer.weight/exp_avg`
<name>/model     the same of another model, such as a critic
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.adapters.files import ADAPTER_PART, saved_adapter
from trainer.step import Learner

Parts = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One model and its optimizer."""

    model: nn.Module
    optimizer: Optimizer
    adapter: bool = False
    """Only an adapter of it is trained."""
    prefix: str = ""
    """Of its parts; empty for the policy."""

    @property
    def weights_part(self) -> str:
        return self.prefix + (ADAPTER_PART if self.adapter else "model")

    @property
    def moments_part(self) -> str:
        return self.prefix + "optimizer"

    def weights(self) -> dict[str, Tensor]:
        """Parameters and saved buffers, the live ones; a tied parameter stands once, as transformers saves it."""
        if self.adapter:
            return saved_adapter(self.model)
        saved = self.model.state_dict(keep_vars=True)
        tensors: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: tensor for name, tensor in tensors.items() if name in saved}

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state, the live one; empty before its first update."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {
            f"{names[id(parameter)]}/{key}": value
            for parameter, states in self.optimizer.state.items()
            for key, value in states.items()
        }

    def set_moments(self, moments: dict[str, Tensor]) -> None:
        """Replaces the whole state of the optimizer."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for full_name, value in moments.items():
            name, _, key = full_name.rpartition("/")
            by_name.setdefault(name, {})[key] = value
        self.optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            if name in by_name:
                self.optimizer.state[parameter] = by_name[name]


def trained_models(learner: Learner) -> Iterator[Trained]:
    """All that `learner` trains."""
    yield Trained(model=learner.model, optimizer=learner.optimizer, adapter=learner.config.lora is not None)
    if learner.critic is not None:
        yield Trained(model=learner.critic.model, optimizer=learner.critic.optimizer, prefix="critic/")


@torch.no_grad()
def parts_of(learner: Learner) -> Parts:
    """The live tensors of all parts."""
    found: Parts = {}
    for trained in trained_models(learner):
        found[trained.weights_part] = trained.weights()
        found[trained.moments_part] = trained.moments()
    return found
