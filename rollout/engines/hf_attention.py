"""Attention of a decode step without copies of the key-value heads.

Transformers repeats each key-value head for the query heads of its group before it calls the kernel, which in a decode
step costs more than the attention itself. With one query position the heads of a group can stand where the query
positions stand, and the stored keys and values are read as they lie.

Shapes: B rows, H query heads, N key-value heads, G = H / N, T positions, D width of a head.
"""

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "offbeat_grouped"


def group_query_heads(model: PreTrainedModel) -> None:
    """Let a model that runs on sdpa decode with grouped query heads; any other is left as it is."""
    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(NAME, grouped_attention)
    model.set_attn_implementation(NAME)


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function of transformers: query (B, H, L, D), key and value (B, N, T, D) -> (B, L, H, D)."""
    scaling = kwargs.get("scaling")
    if query.shape[2] != 1 or attention_mask is None or not isinstance(scaling, float):
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output
    num_rows, num_heads, _, width = query.shape
    query_BNGD = query.view(num_rows, key.shape[1], -1, width)
    if query.dtype == torch.float32 and query.device.type == "cpu":
        # For few positions two batched products beat the CPU kernel of scaled_dot_product_attention.
        scores_BNGT = torch.matmul(query_BNGD * scaling, key.transpose(2, 3)) + attention_mask
        mixed_BNGD = torch.matmul(scores_BNGT.softmax(-1), value)
    else:
        mixed_BNGD = torch.nn.functional.scaled_dot_product_attention(
            query_BNGD, key, value, attn_mask=attention_mask, scale=scaling
        )
    return mixed_BNGD.reshape(num_rows, 1, num_heads, value.shape[3]), None
