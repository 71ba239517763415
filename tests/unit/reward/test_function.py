"""What comes back from a reward function is a finite number, or a failure that says what it was."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reward.function import LARGEST_VALUE, Failure, Score, check_value, one_line


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (0.5, 0.5),
        (-3, -3.0),
        (np.float32(0.25), 0.25),
        (np.int64(7), 7.0),
        (Fraction(1, 4), 0.25),
        ({"score": 2}, 2.0),
        (Score(1.5), 1.5),
        (LARGEST_VALUE, LARGEST_VALUE),
    ],
)
def test_numbers_scores_and_mappings_with_a_score_are_accepted(raw: object, value: float) -> None:
    outcome = check_value(raw)
    assert isinstance(outcome, Score)
    assert outcome.value == value
    assert type(outcome.value) is float


def test_the_other_keys_of_a_mapping_become_the_breakdown() -> None:
    assert check_value({"score": 1.0, "answer": "x" * 2000}) == Score(1.0, {}, "x" * 1000)
    assert check_value({"score": 1.0, "answer": 2}) == Score(1.0, {"answer": 2.0}), "a number is a part, as ever"
    assert check_value({"score": 1.0, "format": np.float64(0.5), "hits": 3}) == Score(1.0, {"format": 0.5, "hits": 3.0})


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (-float("inf"), "-inf"),
        (np.float64("nan"), "nan"),
        (None, "None"),
        (True, "True"),
        (np.bool_(True), "bool"),
        ("1.0", "str '1.0'"),
        ([1.0, 2.0], "list of 2 values"),
        ((), "tuple of 0 values"),
        (np.zeros((2, 3)), "shape (2, 3)"),
        (np.array(1.0), "shape ()"),
        (object(), "object"),
        (1j, "complex"),
        (10**400, "too large"),
        (1e39, "float32"),
        ({}, "without 'score' (keys: none)"),
        ({"value": 1.0}, "without 'score' (keys: value)"),
        ({"score": None}, "None"),
        ({"score": 1.0, "part": float("nan")}, "'part'"),
        ({"score": 1.0, 3: 1.0}, "name"),
        ({"score": 1.0, "": 1.0}, "name"),
        ({"score": 1.0, **{f"p{i}": 0.0 for i in range(65)}}, "65 parts"),
        (Score("high"), "str 'high'"),  # type: ignore[arg-type]
        (Score(1.0, [1.0]), "breakdown"),  # type: ignore[arg-type]
        (Score(1.0, answer=72), "answer that is an object int"),  # type: ignore[arg-type]
    ],
)
def test_everything_else_is_an_invalid_value_that_is_named(raw: object, words: str) -> None:
    outcome = check_value(raw)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "invalid_value"
    assert words in outcome.message


anything = st.one_of(
    st.floats(),
    st.integers(),
    st.booleans(),
    st.none(),
    st.text(),
    st.binary(),
    st.lists(st.floats()),
    st.complex_numbers(),
    st.fractions(),
    hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, max_dims=3, max_side=3)),
    hnp.from_dtype(np.dtype(np.float32)),
)


@given(raw=st.one_of(anything, st.dictionaries(st.text() | st.just("score"), anything)))
def test_no_value_ever_raises_or_passes_as_a_number_that_is_not_finite(raw: object) -> None:
    outcome = check_value(raw)
    if isinstance(outcome, Score):
        numbers = [outcome.value, *outcome.breakdown.values()]
        assert all(math.isfinite(np.float32(number)) for number in numbers)
    else:
        assert outcome.kind == "invalid_value"
        assert outcome.message.isprintable()
        assert len(outcome.message) < 500


@given(raw=anything)
def test_exactly_the_real_numbers_that_fit_float32_are_accepted(raw: object) -> None:
    if isinstance(raw, (int, float, Fraction, np.float32)) and not isinstance(raw, bool):
        assert isinstance(check_value(raw), Score) == (-LARGEST_VALUE <= raw <= LARGEST_VALUE)
    else:
        assert isinstance(check_value(raw), Failure)


def test_a_line_for_the_log_has_no_control_characters_and_a_bounded_length() -> None:
    assert one_line("a\nb\x1b[31m\u202ec") == "a\\nb\\x1b[31m\\u202ec"
    assert one_line("x" * 1000, limit=10) == "xxxxxxx..."
