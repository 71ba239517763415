"""Which servers are pushed to at once: all of them, or crews of a few, one crew after the other, laggards first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import protos
from services.pushes.pushing import Pusher


class Rota:
    """The crews. A server stays in its crew from push to push, so that the crew's group can be used again."""

    def __init__(self, size: int | None) -> None:
        """`size` None: one crew of all."""
        self.size = size
        self._crews: list[list[str]] = []

    def crews(self, names: Iterable[str]) -> list[list[str]]:
        """The crews of these servers. Who is new fills a place that is free."""
        present = set(names)
        self._crews = [kept for crew in self._crews if (kept := [name for name in crew if name in present])]
        for name in sorted(present - {name for crew in self._crews for name in crew}):
            crew = next((crew for crew in self._crews if self.size is None or len(crew) < self.size), None)
            if crew is None:
                self._crews.append([name])
            else:
                crew.append(name)
        return [sorted(crew) for crew in self._crews]


async def roll(
    pusher: Pusher,
    rota: Rota,
    version: int,
    *,
    names: Sequence[str],
    transport: str,
    superseded: Callable[[int], bool] = lambda oldest: False,
) -> AsyncIterator[protos.PushReport]:
    """Bring the packed weights to `names`, a report for each crew; one that fails does not stop the next.

    superseded: whether to leave it at that, where servers of this oldest version are still waiting.
    """
    wanted = set(names)
    crews = [[name for name in crew if name in wanted] for crew in rota.crews(pusher.members)]
    crews = sorted((crew for crew in crews if crew), key=lambda crew: (pusher.oldest(crew), crew))
    while crews:
        crew = crews.pop(0)
        report = await pusher.push(version, transport=transport, names=crew, concludes=not crews)
        report.waiting.extend(name for crew in crews for name in crew)
        yield report
        if crews and superseded(pusher.oldest(report.waiting)):
            return
    if not wanted:
        yield await pusher.push(version, transport=transport, names=[])


def merged(reports: Sequence[protos.PushReport]) -> protos.PushReport:
    """What the pushes to several crews came to, as one."""
    whole = protos.PushReport()
    whole.CopyFrom(reports[-1])
    for report in reports[:-1]:
        whole.committed.extend(report.committed)
        whole.failed.update(report.failed)
        whole.seconds += report.seconds
        whole.transfer_seconds += report.transfer_seconds
        whole.stall_seconds = max(whole.stall_seconds, report.stall_seconds)
    whole.transport = "+".join(sorted({kind for report in reports for kind in report.transport.split("+") if kind}))
    return whole
