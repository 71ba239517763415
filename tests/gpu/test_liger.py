"""Liger's kernels change how a model is computed, not what."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.model.liger import use_liger

pytest.importorskip("liger_kernel")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def made() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).cuda()


def test_logits_and_gradients_are_those_of_the_plain_model() -> None:
    ids_BT = torch.randint(512, (2, 70), generator=torch.Generator().manual_seed(1)).cuda()
    plain = made()
    expected = plain(input_ids=ids_BT).logits
    expected.float().square().mean().backward()
    model = made()
    use_liger(model)
    assert type(model.model.layers[0].mlp).__module__.startswith("transformers"), "patched in place"
    found = model(input_ids=ids_BT).logits
    found.float().square().mean().backward()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-5)
