"""Scores of tokens against log_softmax over all logits: values, gradients, precision, memory.

N tokens, D hidden size, V vocabulary.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model.fused_logprobs import EntropyMode
from trainer.model.logprobs import TokenScores, are_best, score_logits, score_tokens

torch.set_num_threads(1)


def task(tokens: int, vocabulary: int, *, hidden: int = 16, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Hidden states, head and targets; logits of standard deviation 4, so that some tokens are nearly certain."""
    draw = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(tokens, hidden, generator=draw, dtype=torch.float64)
    weight_VD = torch.randn(vocabulary, hidden, generator=draw, dtype=torch.float64) * 4 / hidden**0.5
    targets_N = (hidden_ND @ weight_VD.T).softmax(-1).multinomial(1, generator=draw)[:, 0]
    return hidden_ND.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_(), targets_N


def by_definition(logits_NV: Tensor, targets_N: Tensor, temperature: float = 1.0) -> TokenScores:
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    logprobs_NV = wide_NV.log_softmax(-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    squares_N = logprobs_NV.exp().square().sum(-1)
    return TokenScores(logprobs_NV.gather(-1, targets_N[:, None])[:, 0], entropy_N, squares_N)


def gradients(scores: TokenScores, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Of a loss in which every token, and its entropy where that has a gradient, counts differently."""
    weights_N = torch.linspace(-1, 2, len(scores.logprobs_N)).to(scores.logprobs_N)
    loss = (scores.logprobs_N * weights_N).sum()
    if scores.entropy_N is not None and scores.entropy_N.requires_grad:
        loss = loss + (scores.entropy_N * weights_N.flip(0)).sum() / 3
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("max_logits_mib", [0, 1, 256])
@pytest.mark.parametrize("tokens", [0, 200])
def test_a_token_is_best_where_greedy_decoding_takes_it(max_logits_mib: int, tokens: int) -> None:
    hidden_ND, weight_VD, targets_N = task(max(tokens, 1), 1500)
    hidden_ND, targets_N = hidden_ND[:tokens], targets_N[:tokens]
    expected_N = (hidden_ND @ weight_VD.T).argmax(-1) == targets_N
    found_N = are_best(hidden_ND, weight_VD, targets_N, max_logits_mib=max_logits_mib)
    assert torch.equal(found_N, expected_N)
    assert not tokens or 0 < int(found_N.sum()) < tokens, "both kinds are there"


@pytest.mark.parametrize("max_logits_mib", [0, 1, 256])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_and_gradients_are_those_of_log_softmax_in_blocks_of_any_size(
    max_logits_mib: int, temperature: float
) -> None:
    hidden_ND, weight_VD, targets_N = task(200, 1500)
    wanted: dict[str, Any] = {"temperature": temperature, "max_logits_mib": max_logits_mib, "entropy": "gradient"}
    expected = by_definition(hidden_ND @ weight_VD.T, targets_N, temperature)
    found = score_tokens(hidden_ND, weight_VD, targets_N, square_sums=True, **wanted)
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-12, atol=1e-12)
    ours, theirs = (gradients(scores, hidden_ND, weight_VD) for scores in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    logits_NV = (hidden_ND @ weight_VD.T).detach().requires_grad_()
    standing = score_logits(logits_NV, targets_N, square_sums=True, **wanted)
    torch.testing.assert_close(tuple(standing), tuple(expected), rtol=1e-12, atol=1e-12)
    theirs = gradients(by_definition(logits_NV, targets_N, temperature), logits_NV)
    torch.testing.assert_close(gradients(standing, logits_NV), theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("entropy", ["none", "detached", "gradient"])
@pytest.mark.parametrize("max_logits_mib", [0, 256])
def test_gradients_are_those_of_finite_differences(entropy: EntropyMode, max_logits_mib: int) -> None:
    hidden_ND, weight_VD, targets_N = task(4, 7, hidden=3)

    def differentiable(scores: TokenScores) -> tuple[Tensor, ...]:
        return tuple(part for part in scores if part is not None and part.requires_grad)

    def of_head(hidden_ND: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
        return differentiable(score_tokens(hidden_ND, weight_VD, targets_N, **wanted))

    def of_logits(logits_NV: Tensor) -> tuple[Tensor, ...]:
        return differentiable(score_logits(logits_NV, targets_N, **wanted))

    wanted: dict[str, Any] = {"entropy": entropy, "max_logits_mib": max_logits_mib, "temperature": 0.7}
    wanted["square_sums"] = True
    assert len(of_head(hidden_ND, weight_VD)) == (2 if entropy == "gradient" else 1)
    assert torch.autograd.gradcheck(of_head, (hidden_ND, weight_VD))
    assert torch.autograd.gradcheck(of_logits, ((hidden_ND @ weight_VD.T).detach().requires_grad_(),))


def test_only_what_is_asked_for_is_there_and_only_what_should_has_a_gradient() -> None:
    hidden_ND, weight_VD, targets_N = task(5, 9)
    bare = score_tokens(hidden_ND, weight_VD, targets_N)
    assert bare.logprobs_N.requires_grad and bare.entropy_N is None and bare.square_sums_N is None
    more = score_tokens(hidden_ND, weight_VD, targets_N, entropy="detached", square_sums=True)
    assert more.entropy_N is not None and not more.entropy_N.requires_grad
    assert more.square_sums_N is not None and not more.square_sums_N.requires_grad
    assert len([part for part in _pytree.tree_leaves(more) if getattr(part, "requires_grad", False)]) == 1, (
        "FSDP2 looks through it"
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad_ND,) = torch.autograd.grad(bare.logprobs_N.square().sum(), hidden_ND, create_graph=True)
        grad_ND.sum().backward()  # type: ignore[no-untyped-call]


def test_a_frozen_head_gets_no_gradient_and_a_tied_one_gets_both() -> None:
    _, table_VD, targets_N = task(6, 9)
    ids_N = targets_N.roll(1)
    expected = by_definition(table_VD[ids_N].tanh() @ table_VD.T, targets_N)
    found = score_tokens(table_VD[ids_N].tanh(), table_VD, targets_N, entropy="gradient", max_logits_mib=0)
    torch.testing.assert_close(gradients(found, table_VD), gradients(expected, table_VD))
    hidden_ND, weight_VD, targets_N = task(6, 9)
    frozen = score_tokens(hidden_ND, weight_VD.detach(), targets_N)
    expected = by_definition(hidden_ND @ weight_VD.T, targets_N)._replace(entropy_N=None)
    torch.testing.assert_close(gradients(frozen, hidden_ND), gradients(expected, hidden_ND))


def test_no_tokens_give_no_scores_and_gradients_of_zero() -> None:
    hidden_ND, weight_VD, targets_N = task(3, 9)
    found = score_tokens(hidden_ND[:0], weight_VD, targets_N[:0], entropy="gradient", square_sums=True)
    assert [part.shape for part in found if part is not None] == [(0,)] * 3
    for grad, of in zip(gradients(found, hidden_ND, weight_VD), (hidden_ND, weight_VD), strict=True):
        assert torch.equal(grad, torch.zeros_like(of))
    logits_NV = torch.zeros(0, 9, requires_grad=True)
    assert gradients(score_logits(logits_NV, targets_N[:0]), logits_NV)[0].shape == (0, 9)


def test_tokens_that_a_model_masks_have_no_part() -> None:
    hidden_ND, weight_VD, _ = task(4, 9)
    logits_NV = (hidden_ND @ weight_VD.T).detach()
    masked_NV = torch.cat([logits_NV, torch.full((4, 2), -torch.inf)], dim=1).requires_grad_()
    targets_N = torch.tensor([1, 0, 8, 3])
    found = score_logits(masked_NV, targets_N, entropy="gradient", temperature=0.5)
    logits_NV.requires_grad_()
    expected = by_definition(logits_NV, targets_N, 0.5)
    torch.testing.assert_close(found[:2], expected[:2])
    (grad_NV,) = gradients(found, masked_NV)
    torch.testing.assert_close(grad_NV[:, :9], gradients(expected, logits_NV)[0])
    assert torch.equal(grad_NV[:, 9:], torch.zeros(4, 2, dtype=torch.float64))


@pytest.mark.parametrize("max_logits_mib", [256, 1])
def test_bfloat16_is_as_near_to_the_truth_as_the_plain_model(max_logits_mib: int) -> None:
    hidden_ND, weight_VD, targets_N = task(600, 3000, hidden=64, dtype=torch.bfloat16)
    true_ND, true_VD = (values.detach().double().requires_grad_() for values in (hidden_ND, weight_VD))
    truth = by_definition(true_ND @ true_VD.T, targets_N)
    found = score_tokens(hidden_ND, weight_VD, targets_N, entropy="gradient", max_logits_mib=max_logits_mib)
    plain = by_definition(hidden_ND @ weight_VD.T, targets_N)
    assert found.logprobs_N.dtype == torch.float32
    largest = (true_ND @ true_VD.T).abs().max().item()
    assert (found.logprobs_N - truth.logprobs_N).abs().max() <= 2 * largest * 2**-9 + 1e-5, "both logits rounded once"
    torch.testing.assert_close(found.logprobs_N, plain.logprobs_N, rtol=1e-5, atol=1e-4)
    true = gradients(truth, true_ND, true_VD)
    for ours, theirs, exact in zip(
        gradients(found, hidden_ND, weight_VD), gradients(plain, hidden_ND, weight_VD), true, strict=True
    ):
        assert ours.dtype == torch.bfloat16
        assert relative_error(ours, exact) < min(0.01, 1.1 * relative_error(theirs, exact))


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def test_autocast_rounds_as_it_does_in_the_plain_model() -> None:
    hidden_ND, weight_VD, targets_N = task(30, 40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = score_tokens(hidden_ND, weight_VD, targets_N, entropy="gradient")
        plain = by_definition(functional.linear(hidden_ND, weight_VD), targets_N)
    torch.testing.assert_close(found[:2], plain[:2], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        gradients(found, hidden_ND, weight_VD), gradients(plain, hidden_ND, weight_VD), strict=True
    ):
        assert ours.dtype == torch.float32 and relative_error(ours, theirs) < 0.005
    exact = score_tokens(hidden_ND, weight_VD, targets_N)
    assert (found.logprobs_N - exact.logprobs_N).abs().max() > 1e-4, "outside of it nothing is rounded"


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the most bytes of any tensor that an operator gave."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        sizes = [leaf.nbytes for leaf in _pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return given


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Of the tensors that are kept for backward."""
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


def test_no_tensor_of_all_logits_is_made_and_two_numbers_a_token_are_kept() -> None:
    hidden_ND, weight_VD, targets_N = task(512, 4096, dtype=torch.float32)
    all_logits = 512 * 4096 * 4
    with Allocations() as plain:  # type: ignore[no-untyped-call]
        gradients(by_definition(hidden_ND @ weight_VD.T, targets_N), hidden_ND, weight_VD)
    assert plain.largest == all_logits
    with Allocations() as ours:  # type: ignore[no-untyped-call]
        with saved_bytes() as kept:
            found = score_tokens(hidden_ND, weight_VD, targets_N, entropy="gradient", max_logits_mib=1)
        gradients(found, hidden_ND, weight_VD)
    assert ours.largest == 2**20 == all_logits // 8
    assert sum(kept) == hidden_ND.nbytes + weight_VD.nbytes + targets_N.nbytes + 2 * 512 * 4
    with torch.no_grad(), saved_bytes() as kept:
        assert not score_tokens(hidden_ND, weight_VD, targets_N).logprobs_N.requires_grad
    assert kept == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_give_the_same() -> None:
    hidden_ND, weight_VD, targets_N = task(200, 1500)
    wanted: dict[str, Any] = {"entropy": "gradient", "square_sums": True, "max_logits_mib": 1, "temperature": 0.7}
    eager = score_tokens(hidden_ND, weight_VD, targets_N, **wanted)
    compiled = score_tokens(hidden_ND, weight_VD, targets_N, compiled=True, **wanted)
    torch.testing.assert_close(tuple(compiled), tuple(eager), rtol=1e-10, atol=1e-12)
    ours, theirs = (gradients(scores, hidden_ND, weight_VD) for scores in (compiled, eager))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
