"""A trainer of several ranks that hold the whole weights each: rank 0 alone makes what is pushed, nobody waits."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.config import Config

RANK_CODE = Path(__file__).with_name("replica_rank.py")
MakeConfig = Callable[..., Config]


@pytest.mark.parametrize("memory", ["snapshot", "streamed"])
def test_only_rank_0_holds_and_fills_buckets_of_whole_weights(
    make_config: MakeConfig, tmp_path: Path, memory: str
) -> None:
    config = make_config(
        push={"memory": memory, "bucket_mib": 0.01},
        trainer={"parallel": {"replicas": 0}, "device": "cpu"},
        launch={"trainer_ranks": 2},
    )
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(RANK_CODE), str(tmp_path), config.model_dump_json()]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANK_CODE.parents[2])}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    buckets, snapshot = first["buckets"], memory == "snapshot"
    assert buckets > 3 and first["buffers"] == (buckets if snapshot else 0)
    assert first["fills"] == 3 * buckets, "at the start and for two pushes"
    assert second == {"buckets": buckets, "places": 0, "buffers": 0, "fills": 0}
