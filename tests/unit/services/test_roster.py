"""Who belongs to the run: joining, beating, falling silent, and two processes of one name."""

import pytest

import protos
from services.roster import MISSED_BEATS, Roster


def join(
    name: str = "rollout-0", process_id: str = "a", *, role: str = "rollout", version: int = 0
) -> protos.JoinRequest:
    identity = protos.Identity(name=name, role=role)
    return protos.JoinRequest(identity=identity, address="h:1", process_id=process_id, policy_version=version)


def beat(name: str = "rollout-0", process_id: str = "a") -> protos.HeartbeatRequest:
    return protos.HeartbeatRequest(name=name, process_id=process_id, gauges={"pid": 1.0})


def new_roster() -> Roster:
    return Roster(heartbeat_seconds=1.0)


def test_a_rollout_server_that_joins_has_no_version_until_one_is_brought_to_it() -> None:
    member = new_roster().join(join(version=7), now=0.0)
    assert (member.policy_version, member.has_version) == (7, False)


def test_a_member_is_silent_only_after_all_its_missed_beats() -> None:
    roster = new_roster()
    member = roster.join(join(), now=10.0)
    assert roster.silent(now=10.0 + MISSED_BEATS) == []
    assert roster.silent(now=10.1 + MISSED_BEATS) == [member]
    assert roster.beat(beat(), now=13.0)
    assert roster.silent(now=13.0 + MISSED_BEATS) == []
    assert member.gauges == {"pid": 1.0}


def test_a_beat_of_a_stranger_or_of_an_older_process_is_not_known() -> None:
    roster = new_roster()
    assert not roster.beat(beat(), now=0.0)
    roster.join(join(process_id="a"), now=0.0)
    roster.join(join(process_id="b"), now=1.0)
    assert not roster.beat(beat(process_id="a"), now=2.0)
    assert roster.beat(beat(process_id="b"), now=2.0)


def test_a_lost_member_is_remembered_until_it_joins_again() -> None:
    roster = new_roster()
    roster.join(join(), now=0.0)
    assert roster.lose("rollout-0", "no heartbeat") is not None
    assert roster.lose("rollout-0", "no heartbeat") is None
    assert roster.lost == {"rollout-0": "no heartbeat"}
    roster.join(join(), now=1.0)
    assert roster.lost == {}


def test_the_newest_process_keeps_the_name_and_the_older_one_stays_out() -> None:
    roster = new_roster()
    roster.join(join(process_id="a"), now=0.0)
    roster.join(join(process_id="b"), now=1.0)
    with pytest.raises(ValueError, match="process b has taken over as rollout-0"):
        roster.join(join(process_id="a"), now=2.0)
    assert roster.members["rollout-0"].process_id == "b"
    roster.join(join(process_id="b"), now=3.0)


def test_an_older_process_does_not_come_back_either_once_the_newer_one_is_lost() -> None:
    roster = new_roster()
    roster.join(join(process_id="a"), now=0.0)
    roster.lose("rollout-0", "no heartbeat")
    roster.join(join(process_id="b"), now=1.0)
    roster.lose("rollout-0", "no heartbeat")
    with pytest.raises(ValueError, match="taken over"):
        roster.join(join(process_id="a"), now=2.0)
    roster.join(join(process_id="c"), now=3.0)


def test_members_are_found_by_role() -> None:
    roster = new_roster()
    for name, role in (("rollout-0", "rollout"), ("reward-0", "reward"), ("rollout-1", "rollout")):
        roster.join(join(name, name, role=role), now=0.0)
    assert [member.name for member in roster.of("rollout")] == ["rollout-0", "rollout-1"]
