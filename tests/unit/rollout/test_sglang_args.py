"""Settings of the engine sglang: what is passed on under which name, what is refused and with which words."""

import os
from typing import Any

import pytest

from rollout.config import RolloutConfig
from rollout.engines.sglang_args import arguments, first_gpu, nccl_environment, set_environment, wrong_arguments

KNOWN = {"schedule_policy", "stream_interval", "tp_size", "dp_size"}


def config(**sglang: Any) -> RolloutConfig:
    return RolloutConfig.model_validate(
        {"model": "m", "engine": "sglang", "device": "cuda:2", "max_num_seqs": 64, "sglang": sglang}
    )


def test_our_fields_go_under_sglangs_names() -> None:
    asked = config(tensor_parallel_size=2, attention_backend="triton", cuda_graph_max_bs=32, deterministic=True)
    given = arguments("folder", asked, max_model_len=1000, with_tokenizer=False)
    assert (given["model_path"], given["base_gpu_id"], given["tp_size"]) == ("folder", 2, 2)
    assert (given["max_running_requests"], given["context_length"]) == (64, 1006)
    assert (given["attention_backend"], given["cuda_graph_max_bs_decode"]) == ("triton", 32)
    assert given["enable_deterministic_inference"] is True
    assert given["skip_tokenizer_init"] is True
    assert "sampling_backend" not in given, "what is empty is left to SGLang"


def test_further_arguments_are_passed_on() -> None:
    given = arguments("m", config(engine_args={"schedule_policy": "lpm"}), max_model_len=1000, with_tokenizer=True)
    assert given["schedule_policy"] == "lpm"


def test_memory_that_is_given_back_keeps_the_weights() -> None:
    given = arguments("m", config(enable_memory_saver=True), max_model_len=1000, with_tokenizer=True)
    assert given["enable_memory_saver"] is given["enable_weights_cpu_backup"] is True


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("schedul_policy", "this SGLang has no such argument; did you mean schedule_policy?"),
        ("zzz", "this SGLang has no such argument"),
        ("tp_size", "say it as rollout.sglang.tensor_parallel_size"),
        ("dp_size", "cannot be set: start one rollout server for each copy of the model"),
    ],
)
def test_an_argument_that_cannot_be_passed_on_is_told(name: str, words: str) -> None:
    assert wrong_arguments({name: 1, "stream_interval": 5}, KNOWN) == [
        f"sglang.engine_args.{name}: {words}" if "cannot" not in words else f"sglang.engine_args.{name} {words}"
    ]


def test_the_first_card() -> None:
    assert [first_gpu(device) for device in ("auto", "cuda", "cuda:3")] == [0, 0, 3]
    for device in ("cpu", "cuda:x"):
        with pytest.raises(ValueError, match="needs a GPU"):
            first_gpu(device)


def test_nccl_is_set_as_sglang_will_have_it_unless_the_user_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"})
    set_environment()
    assert nccl_environment() == {"NCCL_CUMEM_ENABLE": "0"}
    assert os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
    os.environ["NCCL_CUMEM_ENABLE"] = "1"
    set_environment()
    assert nccl_environment() == {"NCCL_CUMEM_ENABLE": "1"}
