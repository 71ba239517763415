"""Workers hang, crash, print and die; every other item still gets its value, and no process is left."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from reward.config import RewardConfig
from reward.function import Failure, Outcome, RewardError, Score, ScoreItem
from reward.pool import Pool

GRADER = """
import ctypes, os, re, subprocess, sys, time
from pathlib import Path

if Path(__file__).with_name("broken").exists():
    raise RuntimeError("the disk is gone")


def grade(item):
    match item.response.partition(" ")[0]:
        case "nan": return float("nan")
        case "none": return None
        case "hang":
            while True: pass
        case "regex": return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))
        case "abort": os.abort()
        case "segfault": ctypes.string_at(0)
        case "exit": sys.exit(7)
        case "exit_with_thread":
            import threading
            threading.Thread(target=time.sleep, args=(600,)).start()
            sys.exit("bye")
        case "print":
            print("noise" * 50_000)
            sys.stdout.buffer.write(b"\\x00\\x00\\x00\\x02[]")
            os.write(1, b"more noise")
            subprocess.run(["echo", "and a child"])
        case "slow": time.sleep(0.1)
        case "stdin": input()
        case "raise": raise KeyError("a\\nb\\x1b[31m")
        case "memory": bytearray(2**31)
        case "child": return {"score": 1, "pid": subprocess.Popen(["sleep", "600"]).pid}
        case "wait":
            while not Path(item.response.partition(" ")[2]).exists(): time.sleep(0.005)
    return {"score": 1.0, "pid": os.getpid()}
"""


@pytest.fixture
def grader(tmp_path: Path) -> Path:
    file = tmp_path / "grader.py"
    file.write_text(GRADER)
    return file


def config(grader: Path, **limits: Any) -> RewardConfig:
    settings = {"functions": [{"target": f"{grader}:grade"}], "timeout_seconds": 20.0, "restart_backoff_seconds": 0.01}
    return RewardConfig.model_validate({**settings, **limits})


@asynccontextmanager
async def running(grader: Path, **limits: Any) -> AsyncIterator[Pool]:
    pool = Pool(config(grader, **limits))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def items(*responses: str) -> list[ScoreItem]:
    return [ScoreItem(prompt="q", response=response) for response in responses]


def value(outcome: Outcome) -> float | str:
    return outcome.value if isinstance(outcome, Score) else outcome.kind


def worker_pid(outcome: Outcome) -> int:
    assert isinstance(outcome, Score)
    return int(outcome.breakdown["grade/pid"])


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("response", "kind", "words"),
    [
        ("nan", "invalid_value", "grade: returned nan"),
        ("none", "invalid_value", "grade: returned None"),
        ("hang", "timeout", "no value after 1 s"),
        ("regex", "timeout", "no value after 1 s"),
        ("abort", "crash", "worker was killed by SIGABRT (6)"),
        ("segfault", "crash", "worker was killed by SIGSEGV (11)"),
        ("exit", "crash", "worker exited with code 7"),
        ("exit_with_thread", "crash", "worker exited with code 1"),
        ("stdin", "error", "grade: EOFError"),
        ("raise", "error", "grade: KeyError: 'a\\nb\\x1b[31m' (grader.py, line "),
        ("memory", "error", "grade: MemoryError"),
    ],
)
async def test_a_bad_item_gets_its_failure_and_the_others_of_its_chunk_their_values(
    grader: Path, response: str, kind: str, words: str
) -> None:
    async with running(grader, timeout_seconds=1.0, memory_limit_mb=1024) as pool:
        await pool.score(items(*["warm"] * 200))  # chunks have grown to many items
        before, bad, *after = await pool.score(items("fine", response, *["fine"] * 20))
    assert value(before) == 1.0
    assert [value(outcome) for outcome in after] == [1.0] * 20
    assert isinstance(bad, Failure)
    assert bad.kind == kind
    assert words in bad.message
    assert bad.message.isprintable()


async def test_what_a_function_prints_does_not_reach_the_protocol(grader: Path) -> None:
    async with running(grader) as pool:
        outcomes = await pool.score(items("fine", "print", "fine"))
    assert [value(outcome) for outcome in outcomes] == [1.0, 1.0, 1.0]
    assert pool.num_restarts == 0


async def test_poison_among_many_costs_only_itself_with_several_workers(grader: Path) -> None:
    responses = ["fine"] * 64
    for index in (0, 1, 2, 31, 63):
        responses[index] = "abort"
    async with running(grader, num_workers=2) as pool:
        outcomes = await pool.score(items(*responses))
        await until(lambda: pool.num_restarts == 5)
    assert [value(outcome) for outcome in outcomes] == [1.0 if r == "fine" else "crash" for r in responses]


async def test_close_leaves_neither_workers_nor_their_children(grader: Path) -> None:
    async with running(grader, num_workers=2) as pool:
        child, *fine = await pool.score(items("child", *["fine"] * 50))
        hanging = asyncio.create_task(pool.score(items("hang")))
        await until(lambda: len(pool.pids) == 2)
        pids = {*pool.pids, *(worker_pid(outcome) for outcome in fine), worker_pid(child)}
        assert all(is_running(pid) for pid in pids)
    await until(lambda: not any(is_running(pid) for pid in pids))
    with pytest.raises(RewardError, match="closed"):
        await hanging
    with pytest.raises(RewardError, match="closed"):
        await pool.score(items("fine"))
    await pool.close()
    assert pool.pids == []


async def test_a_child_left_by_a_crashed_worker_goes_with_it(grader: Path) -> None:
    async with running(grader) as pool:
        child, _ = await pool.score(items("child", "abort"))
        await until(lambda: not is_running(worker_pid(child)))


async def test_a_worker_killed_while_idle_is_replaced_and_no_item_is_blamed(grader: Path) -> None:
    async with running(grader) as pool:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: pool.pids == [])
        (outcome,) = await pool.score(items("fine"))
        assert worker_pid(outcome) != pid


async def test_the_queue_is_bounded_and_callers_wait(grader: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with running(grader, max_pending=4) as pool:
        calls = [asyncio.create_task(pool.score(items(*[f"wait {gate}"] * 9))) for _ in range(3)]
        await until(lambda: pool.num_waiting == 4)
        for _ in range(20):
            await asyncio.sleep(0)
            assert pool.num_waiting <= 4
        gate.touch()
        outcomes = await asyncio.gather(*calls)
    assert [[value(outcome) for outcome in call] for call in outcomes] == [[1.0] * 9] * 3


async def test_a_cancelled_call_leaves_the_queue_and_others_are_served(grader: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with running(grader, max_pending=8) as pool:
        first = asyncio.create_task(pool.score(items(f"wait {gate}")))
        await until(lambda: pool.num_waiting == 0)
        cancelled = asyncio.create_task(pool.score(items(*["hang"] * 30)))
        await until(lambda: pool.num_waiting == 8)
        cancelled.cancel()
        gate.touch()
        (outcome,) = await pool.score(items("fine"))
        assert value(outcome) == 1.0
        assert value((await first)[0]) == 1.0
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_slow_items_are_spread_over_the_workers_one_by_one(grader: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with running(grader, num_workers=2) as pool:
        slow = asyncio.create_task(pool.score(items(f"wait {gate}")))
        await until(lambda: len(pool.pids) == 2)
        outcomes = await pool.score(items(*["fine"] * 100))
        assert [value(outcome) for outcome in outcomes] == [1.0] * 100
        gate.touch()
        assert value((await slow)[0]) == 1.0


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_answer_that_came_in_time_counts_though_the_parent_was_busy(
    grader: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def run() -> list[Outcome]:
        async with running(grader, timeout_seconds=0.3) as pool:
            call = asyncio.create_task(pool.score(items("slow")))
            await asyncio.sleep(0)
            await until(lambda: pool.num_waiting == 0)
            time.sleep(0.8)  # noqa: ASYNC251 - the loop is held up past the deadline on purpose
            return await call

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert [value(outcome) for outcome in runner.run(run())] == [1.0]


async def test_an_edit_of_the_file_does_not_reach_a_worker_that_starts_later(grader: Path) -> None:
    async with running(grader) as pool:
        grader.write_text("def grade(item): return -1.0\n")  # noqa: ASYNC240
        outcomes = await pool.score(items("abort", "fine"))
    assert [value(outcome) for outcome in outcomes] == ["crash", 1.0]


async def test_workers_that_do_not_come_up_again_break_the_pool_with_the_reason(grader: Path) -> None:
    async with running(grader, max_restarts=2) as pool:
        grader.with_name("broken").touch()
        with pytest.raises(RewardError, match=r"did not start 3 times in a row.*RuntimeError: the disk is gone"):
            await pool.score(items("abort", "fine"))
        assert pool.fault is not None
        with pytest.raises(RewardError, match="the disk is gone"):
            await pool.score(items("fine"))


async def test_a_worker_that_did_not_start_once_is_tried_again(grader: Path) -> None:
    async with running(grader, max_restarts=1000) as pool:
        broken = grader.with_name("broken")
        broken.touch()
        call = asyncio.create_task(pool.score(items("abort", "fine")))
        await until(lambda: pool.num_restarts == 1)
        broken.unlink()
        assert [value(outcome) for outcome in await call] == ["crash", 1.0]


async def test_large_items_and_odd_characters_pass(grader: Path) -> None:
    async with running(grader) as pool:
        outcomes = await pool.score(items("x" * 3_000_000, "\ud800\x00\u202e", "", *["y" * 300_000] * 10))
        assert await pool.score([]) == []
    assert [value(outcome) for outcome in outcomes] == [1.0] * 13


PARENT = """
import asyncio, sys
from reward.config import RewardConfig
from reward.function import ScoreItem
from reward.pool import Pool

async def main():
    pool = Pool(RewardConfig(functions=[{"target": sys.argv[1]}], timeout_seconds=600))
    await pool.start()
    print(pool.pids[0], flush=True)
    await pool.score([ScoreItem(prompt="", response="hang")])

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal of a parent is Linux's")
async def test_a_hanging_worker_dies_with_its_parent(grader: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, f"{grader}:grade"), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    worker = psutil.Process(pid)
    await until(lambda: worker.cpu_times().user > 0.2)
    parent.kill()
    await parent.wait()
    await until(lambda: not is_running(pid))
