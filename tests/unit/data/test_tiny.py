"""Small models made from a seed, and their warm start."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.small.char_tokenizer import char_tokenizer
from trainer.small.tiny import TinyShape, make_tiny_qwen3
from trainer.small.warmstart import collate, greedy_accuracy, warm_start

TINY = TinyShape(
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_positions=64,
    initializer_range=0.05,
)
SINGLE_DIGITS = [(f"{a}+{b}=", str(a + b)) for a in range(3) for b in range(3)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("preset", "parameters"), [("demo", 644_352), ("gsm8k", 427_136)])
def test_a_preset_loads_as_qwen3_with_the_parameters_it_should_have(
    tmp_path: Path, preset: str, parameters: int
) -> None:
    make_tiny_qwen3(tmp_path, preset=preset)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == "qwen3"
    assert sum(tensor.numel() for tensor in model.parameters()) == parameters
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_seed_decides_the_weights_and_the_global_generator_stays_as_it_was(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    weights = [_bytes(make_tiny_qwen3(tmp_path / str(n), seed=seed, shape=TINY)) for n, seed in enumerate([5, 5, 6])]
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unknown_preset_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'huge'"):
        make_tiny_qwen3(tmp_path, preset="huge")  # type: ignore[arg-type]


def test_only_the_answer_and_the_end_are_learned() -> None:
    tokens_BT, mask_BT, labels_BT = collate(char_tokenizer(), [("1+2=", "3"), ("9+9=", "18")])
    # ids: digit d is d + 3, "+" 13, "=" 17, eos 1, pad 0
    assert tokens_BT.tolist() == [[4, 13, 5, 17, 6, 1, 0], [12, 13, 12, 17, 4, 11, 1]]
    assert mask_BT.tolist() == [[1, 1, 1, 1, 1, 1, 0], [1] * 7]
    assert labels_BT.tolist() == [[-100, -100, -100, -100, 6, 1, -100], [-100, -100, -100, -100, 4, 11, 1]]


def test_a_warm_start_learns_and_stops_at_its_target(tmp_path: Path) -> None:
    make_tiny_qwen3(tmp_path, seed=0, shape=TINY)
    assert _accuracy(tmp_path) < 0.3
    result = warm_start(
        tmp_path, SINGLE_DIGITS, held_out=SINGLE_DIGITS, steps=300, batch_size=16, lr=1e-2, target_accuracy=0.8
    )
    assert result.accuracy >= 0.8
    assert result.steps < 300
    assert _accuracy(tmp_path) == result.accuracy


def test_the_same_seed_gives_the_same_warm_start_bit_for_bit(tmp_path: Path) -> None:
    folders = [make_tiny_qwen3(tmp_path / str(number), shape=TINY) for number in range(3)]
    for folder, seed in zip(folders, [1, 1, 2], strict=True):
        warm_start(folder, SINGLE_DIGITS, held_out=SINGLE_DIGITS, steps=6, batch_size=4, seed=seed)
    assert _bytes(folders[0]) == _bytes(folders[1]) != _bytes(folders[2])


def test_prompts_of_different_lengths_are_answered_alike_alone_and_together(tmp_path: Path) -> None:
    rows = [("1+1=", "2"), ("10+2=", "12"), ("100+200=", "300")]
    make_tiny_qwen3(tmp_path, shape=TINY)
    warm_start(tmp_path, rows, held_out=rows, steps=200, batch_size=6, lr=1e-2, target_accuracy=1.0)
    assert _accuracy(tmp_path, rows) == 1.0
    assert [_accuracy(tmp_path, [row]) for row in rows] == [1.0, 1.0, 1.0]


def test_a_warm_start_without_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs rows"):
        warm_start(tmp_path, [], held_out=SINGLE_DIGITS)


def _accuracy(folder: Path, rows: list[tuple[str, str]] = SINGLE_DIGITS) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return greedy_accuracy(model, AutoTokenizer.from_pretrained(folder), rows)


def _bytes(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()
