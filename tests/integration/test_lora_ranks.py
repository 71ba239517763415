"""An adapter on several trainer ranks against one: sharded bases and factors, gathered for either kind of push."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

RANK_CODE = Path(__file__).with_name("lora_rank.py")


def run_ranks(folder: Path, size: int, *, model: Path, dtype: str) -> Path:
    """Where rank 0 has put what it pushes."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += [str(RANK_CODE), json.dumps({"folder": str(folder), "model": str(model), "dtype": dtype})]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANK_CODE.parents[2])}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_two_ranks_train_and_push_as_one_does(tmp_path: Path, model_folder: Path, dtype: str, close: float) -> None:
    one, two = (run_ranks(tmp_path / str(size), size, model=model_folder, dtype=dtype) for size in (1, 2))
    assert (one / "bases.json").read_text() == (two / "bases.json").read_text()
    for name in ("weights.safetensors", "adapter.safetensors"):
        expected, found = load_file(one / name), load_file(two / name)
        assert expected.keys() == found.keys() and expected
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype
            torch.testing.assert_close(found[key], tensor, rtol=close, atol=close)
    moved = load_file(two / "adapter.safetensors")
    assert all(tensor.any() for tensor in moved.values()), "every B has left its zeros"
