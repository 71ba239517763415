"""Which transports reach a server, best first."""

from services.pushes.transports import Reach, ladder, nccl_of, reach_of

CPU = Reach(transports=frozenset({"gloo", "disk"}))
CARDS = frozenset({"nccl", "ipc", "gloo", "disk"})
TRAINER = Reach(transports=CARDS, gpus=frozenset({"GPU-a"}), nccl="2.28.9")


def server(*, gpu: str = "GPU-b", nccl: str = "2.28.9") -> Reach:
    return Reach(transports=CARDS, gpus=frozenset({gpu}), nccl=nccl, receivers=2)


def test_two_cards_take_nccl_first() -> None:
    assert ladder("auto", TRAINER, server()) == (["nccl", "gloo", "disk"], "")


def test_one_card_takes_its_own_memory_and_never_nccl() -> None:
    assert ladder("auto", TRAINER, server(gpu="GPU-a")) == (["ipc", "gloo", "disk"], "")


def test_a_cpu_server_of_a_gpu_trainer_takes_gloo() -> None:
    assert ladder("auto", TRAINER, CPU) == (["gloo", "disk"], "")


def test_a_differing_nccl_is_passed_over_and_said() -> None:
    found, why = ladder("auto", TRAINER, server(nccl="2.28.9,NCCL_CUMEM_ENABLE=0"))
    assert found == ["gloo", "disk"]
    assert why == "NCCL differs: 2.28.9 here, 2.28.9,NCCL_CUMEM_ENABLE=0 there"


def test_a_wanted_transport_comes_first_and_slower_ones_follow() -> None:
    assert ladder("gloo", TRAINER, server()) == (["gloo", "disk"], "")
    assert ladder("disk", CPU, CPU) == (["disk"], "")


def test_a_wanted_transport_that_does_not_reach_is_said() -> None:
    assert ladder("nccl", CPU, CPU) == (["gloo", "disk"], "nccl does not reach it")


def test_capabilities_come_back_as_they_went() -> None:
    assert reach_of(["engine:vllm", *server().capabilities()]) == server()


def test_settings_that_must_agree_are_part_of_the_version() -> None:
    assert nccl_of("", {"NCCL_CUMEM_ENABLE": "0"}) == ""
    assert nccl_of("2.28.9", {"NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "INFO"}) == "2.28.9,NCCL_CUMEM_ENABLE=0"
