"""The built-in reward functions against tables made by hand."""

from collections.abc import Callable
from typing import cast

import pytest

from reward.function import Score, ScoreItem, check_value
from reward.functions import FUNCTIONS


def value_of(name: str, response: str, ground_truth: str = "", **parameters: object) -> float:
    function = cast(Callable[..., object], FUNCTIONS[name].function)
    outcome = check_value(function(ScoreItem(prompt="q", response=response, ground_truth=ground_truth), **parameters))
    assert isinstance(outcome, Score)
    return outcome.value


def tokens(num_tokens: object) -> ScoreItem:
    return ScoreItem(prompt="q", response="x" * 9999, extra={"response_tokens": str(num_tokens)})


GSM8K = [
    # response, ground truth, strict, flexible
    ("#### 72", "72", 1.0, 1.0),
    ("48 / 2 = 24.\n48 + 24 = 72\n#### 72", "72", 1.0, 1.0),
    ("#### 71", "72", 0.0, 0.0),
    ("The answer is 72", "72", 0.0, 1.0),
    ("The answer is 72.", "72", 0.0, 1.0),
    ("72 is not the answer, 71 is", "72", 0.0, 0.0),
    ("#### 72.", "72", 1.0, 1.0),
    ("#### $72", "72", 1.0, 1.0),
    ("#### $1,234", "1234", 1.0, 1.0),
    ("#### 1,234", "1,234", 1.0, 1.0),
    ("#### 1234", "$1,234.", 1.0, 1.0),
    ("#### -5", "-5", 1.0, 1.0),
    ("#### -$5", "-5", 1.0, 1.0),
    ("#### $-5", "-5", 1.0, 1.0),
    ("#### 5", "-5", 0.0, 0.0),
    ("#### 0.5", "0.5", 1.0, 1.0),
    ("#### 42.0", "42", 0.0, 0.0),
    ("####72", "72", 0.0, 1.0),
    ("###  72", "72", 0.0, 1.0),
    ("#### seventy-two", "72", 0.0, 0.0),
    ("#### 1\n#### 72", "72", 1.0, 1.0),
    ("#### 72\n#### 1", "72", 0.0, 0.0),
    ("#### 72 (that is 6 dozen)", "72", 1.0, 0.0),
    ("#### 72\nDone, all right.", "72", 1.0, 1.0),
    ("It costs $72, ok.", "72", 0.0, 1.0),
    ("", "72", 0.0, 0.0),
    ("No number, none.", "72", 0.0, 0.0),
    ("#### .", "72", 0.0, 0.0),
    ("#### 72", "Half of 144.\n#### 72", 1.0, 1.0),
    ("#### 72" + " and so on" * 40, "72", 0.0, 0.0),
    ("9" * 400 + "\n#### 72", "72", 1.0, 1.0),
    ("#### \u0667\u0662", "72", 0.0, 0.0),
]


@pytest.mark.parametrize(("response", "ground_truth", "strict", "flexible"), GSM8K)
def test_gsm8k_reads_the_answer_as_the_table_says(
    response: str, ground_truth: str, strict: float, flexible: float
) -> None:
    assert value_of("gsm8k", response, ground_truth) == strict
    assert value_of("gsm8k_flexible", response, ground_truth) == flexible
    assert value_of("gsm8k", response, ground_truth, method="flexible") == flexible


def test_gsm8k_looks_as_far_back_as_it_is_told() -> None:
    assert value_of("gsm8k", "#### 72" + " " * 400, "72", clip_characters=1000) == 1.0


@pytest.mark.parametrize("ground_truth", ["", "none", "#### "])
def test_gsm8k_refuses_a_ground_truth_without_a_number(ground_truth: str) -> None:
    with pytest.raises(ValueError, match="ground_truth has no number"):
        value_of("gsm8k", "#### 72", ground_truth)


def test_gsm8k_refuses_an_unknown_method() -> None:
    with pytest.raises(ValueError, match="'strict' or 'flexible'"):
        value_of("gsm8k", "#### 72", "72", method="loose")


@pytest.mark.parametrize(
    ("response", "ground_truth", "value"),
    [("5", "5", 1.0), (" 5\n", "5 ", 1.0), ("05", "5", 0.0), ("5.", "5", 0.0), ("", "5", 0.0), ("5 5", "5", 0.0)],
)
def test_arithmetic_is_an_exact_match_of_the_stripped_texts(response: str, ground_truth: str, value: float) -> None:
    assert value_of("arithmetic", response, ground_truth) == value


def test_arithmetic_refuses_an_empty_ground_truth() -> None:
    with pytest.raises(ValueError, match="empty"):
        value_of("arithmetic", "5", " ")


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("#### 5", 1.0),
        ("so\n#### 5\n\n", 1.0),
        ("####5", 1.0),
        ("#### 5\nmore", 0.0),
        ("####", 0.0),
        ("<answer>5</answer>", 1.0),
        ("<answer>\n5\n</answer> more", 1.0),
        ("<answer> </answer>", 0.0),
        ("<answer>5", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_a_final_answer_line_or_an_answer_tag(response: str, value: float) -> None:
    assert value_of("format", response) == value


def test_format_takes_a_pattern_from_the_config() -> None:
    assert value_of("format", "I think \\boxed{5}.", pattern=r"\\boxed\{.+\}") == 1.0
    assert value_of("format", "#### 5", pattern=r"\\boxed\{.+\}") == 0.0


@pytest.mark.parametrize(
    ("num_characters", "value"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (120, -2.0)]
)
def test_length_falls_in_a_line_over_the_buffer(num_characters: int, value: float) -> None:
    found = value_of("length", "x" * num_characters, max_length=100, buffer_length=20)
    assert found == pytest.approx(value)
    assert str(found) != "-0.0"


def test_length_counts_tokens_where_they_are_known_and_scales_by_its_factor() -> None:
    length = cast(Callable[..., float], FUNCTIONS["length"].function)
    assert length(tokens(95), max_length=100, buffer_length=10, factor=0.5) == pytest.approx(-0.25)


@pytest.mark.parametrize(
    "parameters", [{"buffer_length": 0}, {"buffer_length": 200, "max_length": 100}, {"factor": -1.0}]
)
def test_length_refuses_parameters_that_make_no_sense(parameters: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"buffer_length|factor"):
        value_of("length", "x", "", **parameters)


def test_length_refuses_a_token_count_that_is_no_number() -> None:
    length = cast(Callable[..., float], FUNCTIONS["length"].function)
    with pytest.raises(ValueError, match="invalid literal"):
        length(tokens("many"))


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_function_has_a_version_and_passes_its_own_samples(name: str) -> None:
    spec = FUNCTIONS[name]
    assert spec.name == name
    assert spec.version
    assert len(spec.self_test) >= 3
    for item, expected in spec.self_test:
        outcome = check_value(spec.function(item))
        assert isinstance(outcome, Score) and outcome.value == pytest.approx(expected)
