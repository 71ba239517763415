"""A trainer of two ranks on two GPUs, over NCCL, against one rank on one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.test_ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.parametrize(
    ("spec", "tolerance"),
    [
        ({}, 1e-5),
        ({"parallel": {"replicas": 0}}, 1e-5),
        ({"offload": "all"}, 1e-5),
        ({"parallel": {"compute_dtype": "bfloat16"}}, 5e-3),
    ],
)
def test_two_gpus_train_as_one_does(tmp_path: Path, spec: dict[str, Any], tolerance: float) -> None:
    """Sharded, replicated, with weights and moments in host memory, and in mixed precision."""
    expected, whole = run_ranks(tmp_path / "one", 1, device="cuda")
    metrics, weights = run_ranks(tmp_path / "two", 2, device="cuda", **spec)
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=10 * tolerance)
    for name, tensor in whole.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=tolerance)
