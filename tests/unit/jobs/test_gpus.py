"""Which GPUs `--gpu` chooses, what it refuses and with which words, and how the cores are divided among
their workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.gpus import VISIBLE, Device, NotListedError, choose_gpus, count_gpus, list_gpus, share_cores
from jobs.settings import Settings, load_settings
from jobs.worker_group import plan_workers
from pipelines.errors import ConfigError, ErrorCode
from tests.support.gpu_host import MIG_ID, UUIDS, bus_id, core_text, install_nvidia_smi, write_sys

TWO = (Device("0", UUIDS[0], bus_id(0), "0"), Device("1", UUIDS[1], bus_id(1), "1"))
WITH_MIG = (TWO[0], Device(MIG_ID, MIG_ID, bus_id(1), MIG_ID))


def not_listed() -> tuple[Device, ...]:
    raise NotListedError("`nvidia-smi` is away")


def variables(visible: str | None) -> dict[str, str]:
    return {} if visible is None else {VISIBLE: visible}


def chosen(wanted: str, visible: str | None = None, gpus: tuple[Device, ...] = TWO) -> list[str]:
    return [device.name for device in choose_gpus(wanted, variables(visible), lambda: gpus)]


def refusal(wanted: str, visible: str | None = None, gpus: tuple[Device, ...] | None = TWO) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_gpus(wanted, variables(visible), not_listed if gpus is None else lambda: gpus)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert caught.value.advice
    return caught.value.message


def test_indexes_are_those_of_nvidia_smi() -> None:
    assert chosen("1, 0") == ["1", "0"]
    assert [device.bus_id for device in choose_gpus("1,0", {}, lambda: TWO)] == [bus_id(1), bus_id(0)]
    assert chosen("01") == ["1"]


@pytest.mark.parametrize("name", [UUIDS[1], UUIDS[1][:12]])
def test_a_uuid_or_its_beginning_is_a_gpu(name: str) -> None:
    assert choose_gpus(name, {}, lambda: TWO) == TWO[1:]


def test_a_mig_id_is_passed_on() -> None:
    (device,) = choose_gpus(MIG_ID, {}, lambda: WITH_MIG)
    assert (device.name, device.bus_id) == (MIG_ID, bus_id(1))


def test_all_is_every_gpu_and_every_instance() -> None:
    assert chosen("all") == ["0", "1"]
    assert chosen(" all ", gpus=WITH_MIG) == ["0", MIG_ID]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        (f"{UUIDS[1]}", ["1"]),
        ("1,7,0", ["1"]),
        ("0,0", ["0"]),
        ("0,-1,1", ["0"]),
    ],
)
def test_all_is_what_cuda_visible_devices_allows(visible: str, expected: list[str]) -> None:
    assert chosen("all", visible) == expected


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("7", "GPU 7 does not exist; this host has 0, 1."),
        ("0,2", "GPU 2 does not exist; this host has 0, 1."),
        ("-1", "--gpu: '-1' is not the name of a GPU."),
        ("0,first", "--gpu: 'first' is not the name of a GPU."),
        ("1.0", "--gpu: '1.0' is not the name of a GPU."),
        ("²", "--gpu: '²' is not the name of a GPU."),
        ("0,,1", "--gpu: '' is not the name of a GPU."),
        ("", "--gpu: '' is not the name of a GPU."),
        (" , ", "--gpu: '' is not the name of a GPU."),
        ("0,1,0", "--gpu names GPU 0 twice. A GPU runs one worker."),
        (f"0,{UUIDS[0]}", f"--gpu names GPU {UUIDS[0]} twice. A GPU runs one worker."),
        ("0,all", "--gpu: 'all' is not the name of a GPU."),
        ("GPU-ffff", "GPU GPU-ffff does not exist; this host has 0, 1."),
        ("GPU-", "--gpu: 'GPU-' is not the name of a GPU."),
    ],
)
def test_what_is_no_gpu_of_this_host_is_refused_by_name(wanted: str, message: str) -> None:
    assert refusal(wanted) == message


def test_a_gpu_in_mig_mode_is_named_by_its_instances() -> None:
    assert refusal("1", gpus=WITH_MIG) == f"GPU 1 does not exist; this host has 0, {MIG_ID}."
    assert "this host has none." in refusal("0", gpus=())


def test_a_gpu_that_cuda_visible_devices_hides_is_refused() -> None:
    assert refusal("0,1", "1") == "GPU 0 must not be used: CUDA_VISIBLE_DEVICES is '1'."
    assert "No GPU can be used: CUDA_VISIBLE_DEVICES is ''" in refusal("all", "")


@pytest.mark.parametrize("gpus", [(), None])
def test_all_of_no_gpus_says_what_was_looked_for(gpus: tuple[Device, ...] | None) -> None:
    message = refusal("all", gpus=gpus)
    assert "no GPU was found on this host" in message
    assert "nvidia-smi" in message


def test_names_are_taken_as_they_are_where_gpus_cannot_be_listed(caplog: pytest.LogCaptureFixture) -> None:
    assert [device.name for device in choose_gpus(f"0,3,{UUIDS[5]},{MIG_ID}", {}, not_listed)] == [
        "0",
        "3",
        UUIDS[5],
        MIG_ID,
    ]
    assert "GPUs 0, 3" in caplog.text
    assert refusal("0,x", gpus=None) == "--gpu: 'x' is not the name of a GPU."
    assert "twice" in refusal("0,00", gpus=None)


def test_gpus_come_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in install_nvidia_smi(tmp_path, 2, mig=1).items():
        monkeypatch.setenv(name, value)
    assert list_gpus() == list(WITH_MIG)


def test_an_nvidia_smi_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in install_nvidia_smi(tmp_path, 1, status=15).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotListedError, match="ended with status 15"):
        list_gpus()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(NotListedError, match="could not be run"):
        list_gpus()


def shares(bus_ids: list[str], allowed: range | list[int], system: Path) -> list[str | None]:
    return [None if cores is None else core_text(cores) for cores in share_cores(bus_ids, allowed, system)]


def test_cores_near_a_gpu_go_to_its_worker(tmp_path: Path) -> None:
    near = {bus_id(0): "0-3,8-11", bus_id(1): "4-7,12-15"}
    assert shares([bus_id(0), bus_id(1)], range(16), write_sys(tmp_path, near)) == ["0-3,8-11", "4-7,12-15"]
    assert shares([bus_id(1), bus_id(0)], range(8), tmp_path) == ["4-7", "0-3"]


def test_gpus_of_one_node_divide_it_by_whole_cores(tmp_path: Path) -> None:
    near = {bus_id(number): "0-7" for number in range(2)} | {bus_id(number): "8-15" for number in (2, 3)}
    system = write_sys(tmp_path, near, [(core, core + 4) for core in (0, 1, 2, 3, 8, 9, 10, 11)])
    assert shares([bus_id(number) for number in range(4)], range(16), system) == [
        "0-1,4-5",
        "2-3,6-7",
        "8-9,12-13",
        "10-11,14-15",
    ]


def test_cores_near_no_gpu_are_divided_too(tmp_path: Path) -> None:
    system = write_sys(tmp_path, {bus_id(0): "0-3", bus_id(1): "0-3"})
    assert shares([bus_id(0), bus_id(1)], range(8), system) == ["0-1,4-5", "2-3,6-7"]


@pytest.mark.parametrize(
    "near",
    [
        {},
        {bus_id(0): "0-3"},
        {bus_id(0): "0-6", bus_id(1): "7"},
        {bus_id(0): "0-5", bus_id(1): "4-7"},
        {bus_id(0): "x", bus_id(1): "y"},
    ],
)
def test_cores_are_divided_evenly_where_nothing_better_is_known(near: dict[str, str], tmp_path: Path) -> None:
    assert shares([bus_id(0), bus_id(1)], range(8), write_sys(tmp_path, near)) == ["0-3", "4-7"]
    assert shares(["", ""], range(8), tmp_path) == ["0-3", "4-7"]


def test_a_worker_has_two_cores_or_all(tmp_path: Path) -> None:
    assert shares(["", ""], [0, 3, 5, 9], tmp_path) == ["0,3", "5,9"]
    assert shares(["", ""], range(3), tmp_path) == [None, None]
    assert shares([""], range(64), tmp_path) == [None]
    system = write_sys(tmp_path, {}, [(0, 1, 2, 3)])
    assert shares(["", ""], range(4), system) == ["0-1", "2-3"]


@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("cores", [16, 17, 24, 61])
def test_every_core_has_one_worker(count: int, cores: int, tmp_path: Path) -> None:
    divided = [share for share in share_cores([""] * count, range(cores), tmp_path) if share is not None]
    assert len(divided) == count
    assert sorted(core for share in divided for core in share) == list(range(cores))
    assert min(map(len, divided)) >= 2
    assert max(map(len, divided)) - min(map(len, divided)) <= 1


def test_ports_of_metrics_count_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECH_WORKER__METRICS_PORT", "9108")
    plans = plan_workers(load_settings(), choose_gpus("0,1", {}, lambda: TWO))
    assert [plan.environment["SPEECH_WORKER__METRICS_PORT"] for plan in plans] == ["9108", "9109"]
    assert plan_workers(load_settings(), None)[0].environment == {}


def test_a_worker_sees_its_gpu_by_the_number_that_people_see() -> None:
    plans = plan_workers(Settings(), choose_gpus("1", {}, lambda: TWO))
    assert plans[0].environment == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_each_of_several_workers_has_its_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    devices = choose_gpus("0,1", {}, lambda: TWO)
    assert None not in [plan.cores for plan in plan_workers(Settings(), devices)]


def test_gpus_are_counted_without_the_driver(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 3
    assert [count_gpus({VISIBLE: visible}, tmp_path) for visible in ("", "-1", "NoDevFiles")] == [0, 0, 0]
    assert [
        count_gpus({VISIBLE: visible}, tmp_path) for visible in ("3", "0,1", f"{UUIDS[0]}, {UUIDS[1]}")
    ] == [1, 2, 2]


def test_the_others_are_found_where_one_gpu_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA may count without the lost one, so the others go by their UUIDs."""
    for name, value in install_nvidia_smi(tmp_path, 4, lost=1).items():
        monkeypatch.setenv(name, value)
    assert [device.shown for device in list_gpus()] == ["0", "2", "3"]
    assert caplog.text.count("A GPU may be lost") == 1
    assert [device.name for device in choose_gpus("all", {})] == [UUIDS[0], UUIDS[2], UUIDS[3]]
    assert [device.name for device in choose_gpus("3,0", {})] == [UUIDS[3], UUIDS[0]]
    with pytest.raises(ConfigError, match="GPU 1 does not exist; this host has 0, 2, 3"):
        choose_gpus("0,1", {})
    assert "A GPU may be lost: `nvidia-smi` ended with status 15" in caplog.text
