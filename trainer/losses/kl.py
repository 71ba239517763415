"""Per-token estimators of KL(policy || reference) from two logprobs (http://joschu.net/blog/kl-approx.html)."""

from torch import Tensor

from trainer.corrections import LOG_RATIO_BOUND

K3_BOUND = 10.0


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, *, estimator: str) -> Tensor:
    """Elementwise KL estimate in nats, of the inputs' shape; d = logprobs - reference.

    k1: d. abs: |d|. k2: d^2 / 2. k3: clamp(e^x - x - 1, +-10) with x = clamp(-d, +-20). A + suffix keeps the value and
    takes the gradient of k2, whose expectation is the gradient of the true KL. Raises ValueError on another name.
    """
    difference = logprobs - reference_logprobs
    if estimator.endswith("+"):
        value = _estimate(difference.detach(), estimator[:-1])
        k2 = _estimate(difference, "k2")
        return k2 - k2.detach() + value
    return _estimate(difference, estimator)


def _estimate(difference: Tensor, estimator: str) -> Tensor:
    match estimator:
        case "k1":
            return difference
        case "abs":
            return difference.abs()
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            x = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            return (x.exp() - x - 1).clamp(-K3_BOUND, K3_BOUND)
    raise ValueError(f"unknown KL estimator {estimator!r}")
