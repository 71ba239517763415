"""Random prompts of an exact length, long-tailed budgets, and the model shapes that read them."""

import math
from pathlib import Path
from statistics import mean

import pytest
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.datasets import DataConfig, PromptRow, load_rows
from rollout.datasets.layouts import RowError, row_of
from rollout.datasets.random import clipped_mean, clipped_mu, random_rows
from trainer.small.shapes import SHAPES, make_shape


def data(**values: object) -> DataConfig:
    return DataConfig.model_validate({"type": "random", "words": 509} | values)


def budgets(**values: object) -> list[int]:
    return [int(row.extra["max_tokens"]) for row in load_rows(data(**values)).rows]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shape("tiny", tmp_path_factory.mktemp("shape") / "tiny", dtype="float32")


def test_a_prompt_has_as_many_tokens_as_words_and_every_word_is_known(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for row in load_rows(data(size=20, prompt_tokens=17)).rows:
        ids = tokenizer(row.text)["input_ids"]
        assert len(ids) == 17 and min(ids) >= 3
        assert tokenizer.decode(ids) == row.text


def test_every_id_of_a_shape_has_a_word(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert tokenizer("t0 t508 t509 x")["input_ids"] == [3, 511, 2, 2]
    assert len(tokenizer) == SHAPES["tiny"].vocab_size


def test_a_shape_is_a_model_with_tied_random_weights(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.05) and abs(weight.mean().item()) < 0.002
    assert (model.config.eos_token_id, model.config.pad_token_id) == (1, 0)


def test_a_shape_that_is_there_stays_and_an_unknown_one_is_told(tiny: Path, tmp_path: Path) -> None:
    before = (tiny / "model.safetensors").stat().st_mtime_ns
    assert make_shape("tiny", tiny, seed=5) == tiny
    assert (tiny / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"unknown shape 'qwen3-9b'; there are qwen3-0\.6b"):
        make_shape("qwen3-9b", tmp_path / "none")


def test_the_same_seed_gives_the_same_prompts() -> None:
    one, again, other = (random_rows(size=5, prompt_tokens=4, seed=seed) for seed in (1, 1, 2))
    assert one == again != other
    assert all("max_tokens" not in row.extra for row in one)


def test_budgets_are_long_tailed_within_their_bounds_and_have_the_mean() -> None:
    lengths = budgets(size=4000, prompt_tokens=1, response_mean=256, response_min=16, response_max=2048)
    assert min(lengths) == 16 and max(lengths) == 2048
    assert mean(lengths) == pytest.approx(256, rel=0.05)
    assert sorted(lengths)[2000] < 0.7 * mean(lengths), "the median of a long tail lies below its mean"


def test_the_mean_of_clipped_lengths_in_closed_form() -> None:
    # Bounds out of reach: the mean of a log-normal, exp(mu + sigma^2 / 2).
    assert clipped_mean(2.0, sigma=0.5, low=1e-9, high=1e9) == pytest.approx(math.exp(2.125))
    # No spread worth naming: all lie at exp(mu), or at the bound.
    assert clipped_mean(math.log(30), sigma=1e-6, low=10, high=100) == pytest.approx(30)
    assert clipped_mean(math.log(300), sigma=1e-6, low=10, high=100) == pytest.approx(100)
    assert clipped_mean(clipped_mu(40.0, sigma=1.3, low=8, high=256), sigma=1.3, low=8, high=256) == pytest.approx(40)


def test_a_mean_out_of_the_bounds_is_refused() -> None:
    with pytest.raises(ValidationError, match="response_mean=600 must lie between"):
        data(response_mean=600)
    with pytest.raises(ValidationError, match="takes no path"):
        data(path="x")


@pytest.mark.parametrize("budget", ["0", "-1", "1.5", "many", "4294967296", ""])
def test_a_budget_that_is_no_number_of_tokens_is_refused(budget: str) -> None:
    with pytest.raises(ValueError, match=r"prompt p: max_tokens is .*not a number of response tokens"):
        PromptRow(prompt_id="p", text="t", ground_truth="", data_source="d", extra={"max_tokens": budget})
    with pytest.raises(RowError, match="max_tokens is"):
        row_of({"prompt": "t", "answer": "a", "max_tokens": budget}, prompt_id="p", data_source="d")


def test_a_file_may_give_a_prompt_its_budget() -> None:
    record = {"prompt": "t", "answer": "a", "extra_info": {"max_tokens": 40}}
    assert row_of(record, prompt_id="p", data_source="d").extra["max_tokens"] == "40"
