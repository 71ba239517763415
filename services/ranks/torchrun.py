"""`python -m services.ranks.torchrun RANKS serve trainer ...`: torchrun around a service, with its own exit code.

The first rank that dies takes the others with it, and none is started again here: the launcher starts all anew.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run

from services.serve import BROKEN


def main(ranks: str, *arguments: str) -> int:
    options = ["--standalone", "--nproc-per-node", ranks, "--max-restarts", "0", "--monitor-interval", "0.1"]
    try:
        run(get_args_parser().parse_args([*options, "-m", "services.cli", *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else BROKEN  # a signal
    except SignalException:
        return 1  # the ranks were told, and have had their time to leave
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
