"""What the rows of a job on several GPUs say: faults and what they cost, what was in use, and which part
of a host is full."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_session, job_faults, job_gpu, job_rows, planted
from benchmarks.host_use import HostUse, Reading, rates
from benchmarks.job_faults import Faults
from benchmarks.job_paths import Made
from benchmarks.process_use import Process, ProcessUse
from benchmarks.saturation import shares, verdict

ROW: dict[str, Any] = {
    "gpus": 2,
    "gpu_busy_nvml": [0.9, 0.8, 0.0],
    "cpu_cores": 6.0,
    "busiest_thread_of": {"worker run": 0.4},
}


def test_every_item_of_a_job_with_faults_is_done_once_with_the_bytes_of_the_job_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is killed, and a GPU is gone as far as a CPU can tell. Commits are small, so that both
    happen while items are left."""
    for name, value in (("RESTART_SECONDS", "0.5"), ("COMMIT_ITEMS", "4"), ("COMMIT_SECONDS", "0.1")):
        monkeypatch.setenv(f"NIGHTJAR_TIMES__{name}", value)
    path = tmp_path / "job.json"
    asked = [
        "--device",
        "cpu",
        "--tiny",
        "--items",
        "150",
        "--paths",
        "--gpus",
        "2",
        "--faults",
        "--fault-noticed",
        "--skip-engine",
    ]
    assert job_gpu.main([*asked, "--folder", str(tmp_path), "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert [(fault["gpu"], fault["what"]) for fault in row["faults"]] == [
        ("0", "its engine was killed"),
        ("1", "it was hidden"),
    ]
    assert (row["items"], row["done"], row["failed"], row["other_bytes"]) == (150, 150, 0, 0)
    assert (row["read_back"], row["missing_objects"], row["wrong_objects"]) == (150, 0, 0)
    assert (row["nothing_lost"], row["noticed"]) == (True, True)


def test_a_part_without_time_is_left_out_and_the_rows_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    asked = ["--device", "cpu", "--tiny", "--minutes", "0.1", "--folder", str(tmp_path), "--json", str(path)]
    assert job_gpu.main(asked) == 0
    found = json.loads(path.read_text())
    assert (found["rows"], found["left_out"]) == (
        [],
        ["checkpoint tiny", "engine tiny 1", "folder tiny 1 off"],
    )


def test_what_differs_between_two_jobs() -> None:
    first = {1: ("a", "x"), 2: ("b", "y"), 3: ("c", "z")}
    assert job_faults.differing(first, {1: ("other", "x"), 2: ("b", "y"), 3: ("c", "z")}) == []
    assert job_faults.differing(first, {1: ("a", "x"), 2: ("b", "?"), 4: ("d", "w")}) == [2, 3, 4]


def test_what_is_lost_in_a_store_is_seen() -> None:
    objects = {n: (f"key {n}", hashlib.sha256(b"%d" % n).hexdigest()) for n in range(5)}
    keys = {key for key, _ in objects.values()}
    read = lambda key: b"0" if key == "key 4" else key.removeprefix("key ").encode()  # noqa: E731
    assert job_faults.checked(objects, keys, read) == {
        "missing_objects": 0,
        "orphans": 0,
        "read_back": 5,
        "wrong_objects": 1,
    }
    found = job_faults.checked(objects, keys - {"key 4"} | {"orphan"}, read)
    assert found == {"missing_objects": 1, "orphans": 1, "read_back": 4, "wrong_objects": 0}


def test_nothing_is_lost_only_if_both_faults_came_and_all_is_there(tmp_path: Path) -> None:
    faults = Faults(tmp_path, 2, "0", "1")
    faults.happened += [{"gpu": "0", "at": 1.0}, {"gpu": "1", "at": 2.0}]
    faults.quarantined_at = 32.0
    made = Made([], objects={0: ("a", "x"), 1: ("b", "y")})
    row = job_faults.found_of(made, made, 2, faults) | {"missing_objects": 0, "wrong_objects": 0}
    assert job_faults.nothing_lost(row)
    assert row["quarantined_s"] == 30.0
    for wrong in (
        {"done": 1},
        {"items": 3},
        {"failed": 1},
        {"other_bytes": 1},
        {"missing_objects": 1},
        {"faults": faults.happened[:1]},
    ):
        assert not job_faults.nothing_lost(row | wrong)


def test_a_gpu_is_hidden_from_the_voices_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "__file__", str(tmp_path / "planted.py"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert not planted._is_hidden()  # pyright: ignore[reportPrivateUsage]
    planted.hide(tmp_path, "3")
    assert not planted._is_hidden()  # pyright: ignore[reportPrivateUsage]
    planted.hide(tmp_path, "1")
    assert planted._is_hidden()  # pyright: ignore[reportPrivateUsage]
    assert os.environ["CUDA_VISIBLE_DEVICES"] not in ("1", "3", "")
    planted.show_all(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert not planted._is_hidden()  # pyright: ignore[reportPrivateUsage]


def test_the_part_that_is_full_is_named() -> None:
    found = shares(ROW, 8, 1000.0)
    assert list(found.items()) == [
        ("the GPUs", pytest.approx(0.85)),
        ("all cores", 0.75),
        ("one thread of worker run", 0.4),
    ]
    assert verdict(found) == "Nothing is full; the closest is the GPUs (85%)."
    services = {"services_cores": {"weed": 2.0}, "services_busiest_thread_of": {"postgres": 0.95}}
    row = ROW | services | {"disk_mb_per_s": 500.0, "waited_for": {"cpu": 1.0, "io": 0.3, "memory": 0.0}}
    found = shares(row, 8, 1000.0)
    assert verdict(found) == "Full: all cores (100%), one thread of postgres (95%)."
    assert (found["the disk"], found["waiting for a disk"]) == (0.5, 0.3)
    assert "waiting for cpu" not in found
    assert verdict({}) == "Nothing was measured."


def test_a_hosts_counters_become_rates() -> None:
    first = Reading(10.0, 0, 1000, 2**20, 2**22, (0, 0, 0))
    last = Reading(12.0, 4_000_000, 1000 + 2_000_000 // 1024, 2**21, 2**21, (1_000_000, 500_000, 0))
    found = rates([first, last])
    assert found["loopback_mb_per_s"] == 2.0
    assert found["disk_mb_per_s"] == pytest.approx(1.0, rel=1e-3)
    assert (found["dirty_gib"], found["available_gib"]) == (2.0, 2.0)
    assert found["waited_for"] == {"cpu": 0.5, "io": 0.25, "memory": 0.0}
    assert rates([first]) == {}
    assert "waited_for" not in rates([first._replace(waited_us=(-1, -1, -1)), last])


def test_this_host_and_this_process_are_read() -> None:
    use, host = ProcessUse([os.getpid()], 0.01), HostUse(0.01)
    use.stop()
    host.stop()
    process = use.processes[os.getpid()]
    assert process.memory[0][1] > 2**20
    assert len(process.threads) >= 1
    assert host.readings[0].available_kib > 1024


def test_the_busiest_thread_and_the_memory_of_a_process() -> None:
    threads = {
        7: Process(7, "worker", [(10.0, 0.0), (12.0, 1.8)]),
        8: Process(8, "worker", [(10.0, 0.0), (12.0, 0.2)]),
    }
    process = Process(1, "worker", [], [(10.0, 5, 1), (11.0, 7, 1)], threads)
    assert process.busiest_thread(10.0, 12.0) == pytest.approx(0.9)
    assert [process.bytes_at(when) for when in (9.0, 10.5, 12.0, 14.0)] == [(0, 0), (5, 1), (7, 1), (0, 0)]


def test_rows_are_compared_with_one_gpu_and_with_the_engine() -> None:
    rows: list[dict[str, Any]] = [
        {"path": path, "size": "0b6", "gpus": gpus, "qa": "off", "job_audio_s_per_s": rate}
        for path, gpus, rate in (("folder", 1, 100.0), ("folder", 8, 780.0), ("s3", 8, 600.0))
    ]
    rows.append({"path": "engine", "size": "0b6", "gpus": 8, "engine_audio_s_per_s": 800.0})
    job_rows.compare_with_one_gpu(rows)
    job_rows.compare_with_engine(rows)
    assert [row.get("times_one_gpu") for row in rows] == [None, 7.8, None, None]
    assert [row.get("share") for row in rows] == [None, 0.975, 0.75, None]


def test_parts_of_one_result_are_put_together(tmp_path: Path) -> None:
    row = {"path": "folder", "size": "0b6", "gpus": 1, "slots": 512}
    part = {"commit": "c", "device": "d", "cores": 128, "faults": {}, "left_out": [], "rows": [row]}
    other = part | {
        "faults": {"s3 1b7": "Traceback"},
        "left_out": ["engine 1b7 8"],
        "rows": [row | {"size": "1b7"}],
        "checkpoint_1b7": {},
    }
    whole = job_rows.merged([part, other])
    assert [one["size"] for one in whole["rows"]] == ["0b6", "1b7"]
    assert (whole["faults"], whole["left_out"], whole["checkpoint_1b7"]) == (
        {"s3 1b7": "Traceback"},
        ["engine 1b7 8"],
        {},
    )
    with pytest.raises(ValueError, match="commit"):
        job_rows.merged([part, other | {"commit": "e"}])


def test_a_session_takes_the_steps_of_eight_gpus_only_by_name(tmp_path: Path) -> None:
    known = gpu_session.steps("cuda", False, tmp_path)
    assert "eight" in {step.group for step in known} - {step.group for step in gpu_session.named(known, [])}
    (step,) = gpu_session.named(known, ["eight 1.7B"])
    assert step.arguments[step.arguments.index("--sizes") + 1] == "1b7"
    # Within a call of ten minutes, and the benchmark ends by itself before the session ends it.
    assert 60 * float(step.arguments[step.arguments.index("--minutes") + 1]) < step.limit_s < 600
