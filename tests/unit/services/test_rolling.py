"""Crews: how many, who stays with whom, who comes first, and when a push is left at that."""

from collections.abc import Sequence
from typing import Any, cast

import protos
from services.pushes.pushing import Pusher
from services.pushes.rolling import Rota, merged, roll


def test_a_crew_is_no_larger_than_allowed_and_without_a_limit_there_is_one() -> None:
    assert Rota(2).crews("abcde") == [["a", "b"], ["c", "d"], ["e"]]
    assert Rota(None).crews("abc") == [["a", "b", "c"]]
    assert Rota(2).crews([]) == []


def test_crews_stay_together_and_who_is_new_fills_a_free_place() -> None:
    rota = Rota(2)
    rota.crews("abcd")
    assert rota.crews("acd") == [["a"], ["c", "d"]]
    assert rota.crews("acdxy") == [["a", "x"], ["c", "d"], ["y"]]
    assert rota.crews("y") == [["y"]]


class Told(Pusher):
    """A pusher that only notes to whom it would push; those in `broken` fail."""

    def __init__(self, versions: dict[str, int], broken: str = "") -> None:
        self.versions = versions
        self.broken = broken
        self.pushes: list[list[str]] = []

    @property
    def members(self) -> list[str]:
        return sorted(self.versions)

    def oldest(self, names: Sequence[str]) -> int:
        return min(self.versions[name] for name in names)

    async def push(self, version: int, **options: Any) -> protos.PushReport:
        names = list(options["names"])
        self.pushes.append(names)
        report = protos.PushReport(policy_version=version, seconds=1.0, transport="gloo")
        for name in names:
            if name in self.broken:
                report.failed[name] = "dead"
            else:
                report.committed.append(name)
                self.versions[name] = version
        return report


async def rolled(pusher: Told, version: int, *, size: int | None = 1, **options: Any) -> list[protos.PushReport]:
    names = options.pop("names", pusher.members)
    return [report async for report in roll(pusher, Rota(size), version, names=names, transport="auto", **options)]


async def test_laggards_come_first_and_reports_say_who_still_waits() -> None:
    pusher = Told({"a": 2, "b": 1, "c": 2})
    reports = await rolled(pusher, 3)
    assert pusher.pushes == [["b"], ["a"], ["c"]]
    assert [list(report.waiting) for report in reports] == [["a", "c"], ["c"], []]


async def test_a_crew_that_fails_does_not_stop_the_next() -> None:
    pusher = Told({"a": 0, "b": 0, "c": 0}, broken="a")
    reports = await rolled(pusher, 1)
    assert pusher.pushes == [["a"], ["b"], ["c"]]
    whole = merged(reports)
    assert (sorted(whole.committed), dict(whole.failed), list(whole.waiting)) == (["b", "c"], {"a": "dead"}, [])
    assert (whole.seconds, whole.transport, whole.policy_version) == (3.0, "gloo", 1)


async def test_with_one_crew_of_all_there_is_one_push() -> None:
    pusher = Told({"a": 2, "b": 1})
    assert len(await rolled(pusher, 3, size=None)) == 1 and pusher.pushes == [["a", "b"]]


async def test_where_nobody_needs_the_version_it_is_reported_all_the_same() -> None:
    (report,) = await rolled(Told({"a": 3}), 3, names=[])
    assert (report.policy_version, list(report.committed)) == (3, [])


async def test_an_overtaken_push_leaves_out_who_may_lag_and_the_skew_holds_at_every_instant() -> None:
    """Every push is overtaken by the next version; servers may lag 2 behind."""
    pusher, skew = Told({"a": 0, "b": 0, "c": 0}), 2
    rota = Rota(1)
    skipped = 0
    for version in range(1, 20):
        reports = roll(
            cast(Pusher, pusher),
            rota,
            version,
            names=pusher.members,
            transport="auto",
            superseded=lambda oldest, version=version: version + 1 - oldest <= skew,  # type: ignore[misc]
        )
        waiting = 0
        async for report in reports:
            waiting = len(report.waiting)
            assert max(pusher.versions.values()) - min(pusher.versions.values()) <= skew
        skipped += waiting
    assert skipped >= 19, "it does leave servers out"
