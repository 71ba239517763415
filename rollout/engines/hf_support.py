"""Can this model be served by the slot cache? Asked at start, so that the answer is a message and not wrong text."""

import inspect

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from rollout.engines.hf_cache import SlotCache

NEEDED_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")


def check_supported(model: PreTrainedModel) -> None:
    """ValueError, saying why, where the model takes other arguments or keeps other state than keys and values."""
    name = type(model).__name__
    lacking = [one for one in NEEDED_ARGUMENTS if one not in inspect.signature(model.forward).parameters]
    if lacking:
        raise ValueError(f"engine hf cannot serve {name}: its forward takes no {', '.join(lacking)}")
    other = {
        type(layer).__name__ for layer in DynamicCache(config=model.config).layers if type(layer) is not DynamicLayer
    }
    if other:
        raise ValueError(f"engine hf cannot serve {name}: it needs full attention in every layer, not {sorted(other)}")


@torch.inference_mode()
def check_agreement(model: PreTrainedModel) -> None:
    """Decode one token through the slot cache and compare with a plain forward pass; ValueError if they differ."""
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype
    ids_BL = (torch.arange(10, device=device) % model.get_input_embeddings().num_embeddings).view(2, 5)
    try:
        plain = model(input_ids=ids_BL, use_cache=False).logits[:, -1]
        cached = _decoded(model, ids_BL)
    except Exception as error:
        raise ValueError(f"engine hf cannot serve {type(model).__name__}: {error}") from error
    difference = (plain.float().log_softmax(-1) - cached.float().log_softmax(-1)).abs().max().item()
    if not difference < (1e-3 if dtype == torch.float32 else 0.5):
        raise ValueError(
            f"engine hf cannot serve {type(model).__name__}: with its cache, logprobs are off by {difference:.3g}"
        )


def _decoded(model: PreTrainedModel, ids_BL: torch.Tensor) -> torch.Tensor:
    """Logits after the last token, of which all but the last went through prefill."""
    device = ids_BL.device
    length = ids_BL.shape[1]
    cache = SlotCache(model.config.num_hidden_layers, max_slots=2, max_length=length)
    positions = torch.arange(length, device=device)[None]
    cache.begin_prefill()
    model(input_ids=ids_BL[:, :-1], position_ids=positions[:, :-1], past_key_values=cache, use_cache=True)
    rows = torch.arange(2, device=device)
    cache.store(rows, source_B=rows)
    visible = cache.begin_decode(torch.full_like(rows, length - 1), length=length)
    dtype = next(model.parameters()).dtype
    mask_BT = torch.zeros((2, visible), dtype=dtype, device=device)
    mask_BT[:, length:] = torch.finfo(dtype).min
    output = model(
        input_ids=ids_BL[:, -1:],
        attention_mask=mask_BT[:, None, None],
        position_ids=positions[:, -1:].expand(2, 1),
        past_key_values=cache,
        use_cache=True,
    )
    logits: torch.Tensor = output.logits[:, -1]
    return logits
