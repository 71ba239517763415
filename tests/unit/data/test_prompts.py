"""The stream of prompts: every row once an epoch, any position at once, the same order everywhere."""

import pytest

from rollout.datasets.row import PromptRow
from rollout.prompts import PromptStream, permutation


def test_every_epoch_holds_every_row_once_and_has_its_own_order() -> None:
    stream = PromptStream(_rows(7), seed=1, shuffle=True)
    epochs = [[stream.at(epoch * 7 + place) for place in range(7)] for epoch in range(3)]
    for number, rows in enumerate(epochs):
        assert {epoch for epoch, _ in rows} == {number}
        assert {row.prompt_id for _, row in rows} == {f"p/{index}" for index in range(7)}
    orders = [[row.prompt_id for _, row in rows] for rows in epochs]
    assert orders[0] != orders[1] != orders[2]


def test_a_position_gives_the_same_row_whatever_was_asked_before() -> None:
    in_order = PromptStream(_rows(5), seed=4, shuffle=True)
    expected = [in_order.at(position) for position in range(20)]
    resumed = PromptStream(_rows(5), seed=4, shuffle=True)
    assert [resumed.at(position) for position in (13, 2, 19, 0, 7)] == [expected[n] for n in (13, 2, 19, 0, 7)]


def test_without_shuffle_the_rows_come_in_their_own_order() -> None:
    stream = PromptStream(_rows(3), seed=0, shuffle=False)
    assert [(epoch, row.prompt_id) for epoch, row in map(stream.at, range(4))] == [
        (0, "p/0"),
        (0, "p/1"),
        (0, "p/2"),
        (1, "p/0"),
    ]


def test_the_permutation_is_the_order_of_the_hashes() -> None:
    # printf '0/0/%d' I | sha256sum begins with 54, 6b, 43, d5 for I = 0, 1, 2, 3 (taken outside Python)
    assert permutation(4, seed=0, epoch=0) == [2, 0, 1, 3]


def test_seeds_give_different_orders() -> None:
    assert permutation(50, seed=0, epoch=0) != permutation(50, seed=1, epoch=0)


@pytest.mark.parametrize(("rows", "reason"), [(0, "at least one row"), (-1, "not unique")])
def test_no_rows_or_repeated_ids_are_an_error(rows: int, reason: str) -> None:
    given = _rows(rows) if rows >= 0 else _rows(1) + _rows(1)
    with pytest.raises(ValueError, match=reason):
        PromptStream(given, seed=0, shuffle=True)


def test_a_negative_position_is_an_error() -> None:
    with pytest.raises(ValueError, match="start at 0"):
        PromptStream(_rows(1), seed=0, shuffle=True).at(-1)


def test_a_row_has_either_text_or_messages() -> None:
    with pytest.raises(ValueError, match="either text or messages"):
        PromptRow(prompt_id="p/0", ground_truth="", data_source="p")


def _rows(number: int) -> list[PromptRow]:
    return [PromptRow(prompt_id=f"p/{n}", text=f"{n}", ground_truth="", data_source="p") for n in range(number)]
