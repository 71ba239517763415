"""What a baseline is told and what it answers: one JSON file each way; its own talk goes to a log beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.errors import OffbeatError
from services.launch import environment, tail

Job = dict[str, Any]
Answer = dict[str, Any]
JOB_SECONDS = 420.0
GRACE_SECONDS = 15.0
TOLD_LINES = 40
BARE = "services.bench.bare"
RANKS = ("torch.distributed.run", "--standalone", "--nproc-per-node")


class Baseline:
    """A running baseline: one process, or several `ranks` under torchrun, of which the first answers."""

    def __init__(
        self,
        module: str,
        job: Job,
        *,
        folder: Path,
        gpus: str | None,
        threads: int = 0,
        python: str = sys.executable,
        ranks: int = 1,
        package: str = BARE,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._module = module
        self.log, self._answer = folder / f"{module}.log", folder / f"{module}.answer.json"
        self._answer.unlink(missing_ok=True)
        told = folder / f"{module}.job.json"
        told.write_text(json.dumps(job))
        several = (*RANKS, str(ranks), "-m") if ranks > 1 else ()
        command = [python, "-P", "-m", *several, f"{package}.{module}", str(told), str(self._answer)]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment(threads, gpus)
            )

    def answer(self, *, seconds: float = JOB_SECONDS) -> Answer:
        """Wait for the end; OffbeatError with the end of the log where it failed or took too long."""
        try:
            code = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise OffbeatError(
                f"{self._module} took more than {seconds:g} s:\n{tail(self.log, lines=TOLD_LINES)}"
            ) from None
        finally:
            self.end()
        if code or not self._answer.exists():
            raise OffbeatError(f"{self._module} failed (exit code {code}):\n{tail(self.log, lines=TOLD_LINES)}")
        answer: Answer = json.loads(self._answer.read_text())
        return answer

    def end(self) -> None:
        """Stop it, if it still runs: torchrun ends its ranks only when it is asked, not when it is killed."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def answering(work: Callable[[Job], Answer]) -> None:
    """The main function of a baseline; of several ranks the first one answers."""
    told, answered = map(Path, sys.argv[1:3])
    answer = json.dumps(work(json.loads(told.read_text())))
    if int(os.environ.get("RANK", "0")):
        return
    scratch = answered.with_suffix(".tmp")
    scratch.write_text(answer)
    os.replace(scratch, answered)
