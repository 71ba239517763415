"""The weight of the KL in the reward, led towards a target (arXiv 1909.08593, section 2.2)."""

ERROR_BOUND = 0.2


def adapted(coefficient: float, kl: float, *, target: float, horizon: int, samples: int) -> float:
    """The next step's coefficient: coefficient * (1 + clip(kl / target - 1, +-0.2) * samples / horizon).

    `kl` is the mean over the batch's samples of their mean KL per token, nats. Raises ValueError where a batch is so
    large for the horizon that the coefficient could lose its sign.
    """
    if ERROR_BOUND * samples >= horizon:
        raise ValueError(f"kl_horizon={horizon} must exceed a fifth of the batch, which has {samples} samples")
    error = min(max(kl / target - 1, -ERROR_BOUND), ERROR_BOUND)
    return coefficient * (1 + error * samples / horizon)
