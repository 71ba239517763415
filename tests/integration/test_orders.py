"""What rank 0 tells the others: real processes under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

RANK_CODE = Path(__file__).with_name("orders_rank.py")


def test_ranks_leave_with_a_rank_0_that_could_not_tell_them() -> None:
    """A drain whose grace is over in the middle of a step, say: torchrun would wait for them for ever.

    They are slow, too: all orders are there before they take the first.
    """
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANK_CODE.parents[2])}
    done = subprocess.run(
        [*command, str(RANK_CODE)], env=variables, capture_output=True, text=True, timeout=40, check=False
    )
    assert done.returncode == 0, done.stderr
