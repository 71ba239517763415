"""Optimal token baseline for tool-integrated reasoning: places are counted without what tools have said.

Dimensions: B samples, R response tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from trainer.advantages.optimal_token_baseline import counted_returns, optimal_token_baseline
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs


def tir_optimal_token_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """optimal_token_baseline over the counted tokens moved together to the left, and its advantages moved back.

    So the n-th own token of one sample is compared with the n-th own token of another, whatever stood between. Uses no
    option.
    """
    order_BR = inputs.mask_BR.argsort(dim=-1, descending=True, stable=True)
    found = optimal_token_baseline(_moved(inputs, order_BR), options)
    advantages_BR = torch.zeros_like(found.advantages_BR).scatter(1, order_BR, found.advantages_BR)
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=counted_returns(inputs))


def _moved(inputs: AdvantageInputs, order_BR: Tensor) -> AdvantageInputs:
    def move(values_BR: Tensor | None) -> Tensor | None:
        return None if values_BR is None else values_BR.gather(1, order_BR)

    return replace(
        inputs,
        token_rewards_BR=inputs.token_rewards_BR.gather(1, order_BR),
        mask_BR=inputs.mask_BR.gather(1, order_BR),
        logprobs_BR=move(inputs.logprobs_BR),
        square_sums_BR=move(inputs.square_sums_BR),
        importance_weights_BR=move(inputs.importance_weights_BR),
    )
