"""The start model read again for a push of an adapter: which weights, in which dtype, and whether they are right."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from protos import BeginPushRequest, LowRankUpdate, Manifest, TensorSpec
from protos.buckets import make_manifest, weights_of
from protos.generated.trajectory_pb2 import DType
from protos.lowrank import fingerprints
from protos.tensors import WIRE_DTYPES
from rollout.engines.sglang_model import Outline
from rollout.engines.vllm_model import ModelFacts
from rollout.merged import Merged
from rollout.start_weights import INDEX, StartWeights
from rollout.weights import Receiver

CPU = torch.device("cpu")
STORED = {
    "one.weight": torch.arange(6.0).view(3, 2),
    "two.weight": torch.full((3, 5), 1.001),
    "norm.weight": torch.ones(3, dtype=torch.bfloat16),
}


def update(name: str, *, dtype: torch.dtype = torch.float32) -> LowRankUpdate:
    wire = WIRE_DTYPES[dtype]
    checksum = fingerprints([STORED[name].to(dtype)])[0]
    return LowRankUpdate(name=name, a="a", b="b", scaling=0.5, dtype=wire, base_dtype=wire, base_checksum=checksum)


def manifest(one: LowRankUpdate, *, a: tuple[int, ...], b: tuple[int, ...]) -> Manifest:
    specs = [
        TensorSpec(name="a", dtype=DType.DTYPE_FLOAT32, shape=a),
        TensorSpec(name="b", dtype=DType.DTYPE_FLOAT32, shape=b),
    ]
    return make_manifest(specs, bucket_bytes=1000, low_rank=[one])


@pytest.fixture(params=["one file", "shards"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "one file":
        save_file(STORED, tmp_path / "model.safetensors")
        return tmp_path
    for name, tensor in STORED.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    places = ", ".join(f'"{name}": "{name}.safetensors"' for name in STORED)
    (tmp_path / INDEX).write_text(f'{{"weight_map": {{{places}}}}}')
    return tmp_path


def test_what_is_asked_for_comes_in_the_trainers_dtype_and_nothing_else(folder: Path) -> None:
    start = StartWeights(str(folder), CPU)
    found = start.bases([update("two.weight", dtype=torch.bfloat16)])
    assert found.keys() == {"two.weight"} and found["two.weight"].dtype == torch.bfloat16
    assert torch.equal(found["two.weight"], STORED["two.weight"].bfloat16()) and start.others == {}


def test_it_is_read_once_until_it_is_given_back(folder: Path) -> None:
    start, updates = StartWeights(str(folder), CPU), [update("one.weight")]
    first = start.bases(updates)["one.weight"]
    assert start.bases(updates)["one.weight"] is first
    start.release()
    assert start.bases(updates)["one.weight"] is not first


def test_a_model_that_must_be_whole_gets_the_other_weights_too(folder: Path) -> None:
    start = StartWeights(str(folder), CPU, whole=True)
    start.bases([update("one.weight")])
    assert start.others.keys() == {"two.weight", "norm.weight"}
    assert start.others["norm.weight"].dtype == torch.bfloat16


def test_another_start_model_and_a_name_that_is_not_there_are_told(folder: Path) -> None:
    other, unknown = update("one.weight"), update("two.weight")
    other.base_checksum ^= 1
    unknown.name = "six.weight"
    with pytest.raises(ValueError, match=r"is not the trainer's start model: one\.weight differs \(1 in all\)"):
        StartWeights(str(folder), CPU).bases([other])
    with pytest.raises(ValueError, match=r"no tensor six\.weight \(1 in all\): push it merged"):
        StartWeights(str(folder), CPU).bases([unknown])
    with pytest.raises(ValueError, match="no safetensors"):
        StartWeights(str(folder / ".."), CPU).bases([unknown])


def test_the_sum_is_what_it_is_by_hand_and_lies_in_the_same_memory_each_time(folder: Path) -> None:
    one = update("one.weight")
    one.dtype = DType.DTYPE_BFLOAT16
    merged = Merged(manifest(one, a=(1, 2), b=(3, 1)), StartWeights(str(folder), CPU), CPU)
    places = set()
    for factor in (1.0, 3.0):
        merged.make({"a": torch.tensor([[2.0, 4.0]]) * factor, "b": torch.tensor([[1.0], [0.0], [-1.0]])})
        ((name, tensor),) = merged.tensors()
        expected = torch.tensor([[0 + factor, 1 + 2 * factor], [2.0, 3.0], [4 - factor, 5 - 2 * factor]])
        assert name == "one.weight" and torch.equal(tensor, expected.bfloat16())
        places.add(tensor.data_ptr())
    assert len(places) == 1


def test_the_weights_of_a_manifest_are_the_sums_that_its_factors_make() -> None:
    (found,) = weights_of(manifest(update("one.weight"), a=(4, 2), b=(3, 4)))
    assert (found.name, tuple(found.shape), found.dtype) == ("one.weight", (3, 2), DType.DTYPE_FLOAT32)
    wrong: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((4, 2), (3, 5)), ((4,), (3, 4))]
    for a, b in wrong:
        with pytest.raises(ValueError, match=r"one\.weight: factors"):
            weights_of(manifest(update("one.weight"), a=a, b=b))
    plain: list[Tensor] = []
    assert weights_of(make_manifest([], bucket_bytes=1)) == plain


def test_a_receiver_without_a_start_model_refuses_an_adapter() -> None:
    request = BeginPushRequest(manifest=manifest(update("one.weight"), a=(4, 2), b=(3, 4)), deadline_seconds=1)
    with pytest.raises(ValueError, match="does not say where its start model lies"):
        Receiver(CPU).open(request)


def test_the_engines_look_at_the_sums_and_not_at_the_factors() -> None:
    shapes: dict[str, tuple[int, ...]] = {"one.weight": (3, 2), "norm.weight": (3,)}
    facts = ModelFacts(dtype="float32", shapes=shapes, end_ids=(), tokenizer=None)
    known = {name: (name, "float32", shape) for name, shape in shapes.items()}
    outline = Outline(
        max_model_len=9, vocab_size=9, end_ids=frozenset(), tokenizer=None, listed=list(known.values()), known=known
    )
    fitting, wrong = (manifest(update("one.weight"), a=(4, columns), b=(3, 4)) for columns in (2, 7))
    assert facts.mistakes(fitting, dtype="float32", whole=True) == outline.misfits(fitting) == []
    assert facts.mistakes(wrong, dtype="float32", whole=True) == ["one.weight has shape (3, 7), not (3, 2)"]
    assert outline.misfits(wrong) == ["one.weight comes as float32 (3, 7), not float32 (3, 2)"]
    assert "has dtype float32, not bfloat16" in facts.mistakes(fitting, dtype="bfloat16", whole=False)[0]
