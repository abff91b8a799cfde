"""Exports that are pushed to a hub: to a stand-in for it, and what keeps a push from happening."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import nightjar
from jobs.cli import main
from jobs.export.hub import check_push
from jobs.store import FolderStore
from pipelines.errors import ConfigError, ErrorCode, NightjarError, ServiceError
from tests.support.export_kit import Finished, finished_job, run_all
from tests.support.hub_server import TOKEN, HubServer, hub_server

if find_spec("datasets") is None:  # which takes a second to import
    pytest.skip(
        "NOT PUSHED: the library datasets is missing; it comes with the extra `dev`.", allow_module_level=True
    )

LINES: list[dict[str, Any]] = [
    {"example_id": f"u{number}", "messages": [["user", "text", f"Text {number}"]]} for number in range(6)
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The stand-in, where the libraries look for the hub. It takes files over HTTP, not over Xet."""
    with hub_server() as server:
        constants = {
            "huggingface_hub.constants.ENDPOINT": server.url,
            "huggingface_hub.constants.HF_HUB_DISABLE_XET": True,
            "huggingface_hub.constants.HF_HUB_OFFLINE": False,
            "huggingface_hub.constants.HF_TOKEN_PATH": str(tmp_path / "token"),
            "datasets.config.HF_ENDPOINT": server.url,
        }
        for name, value in constants.items():
            monkeypatch.setattr(name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Finished]:
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES, seconds=0.1)
    monkeypatch.setenv("SPEECH_DATABASE_URL", made.ledger.url)
    monkeypatch.setenv("SPEECH_HOME", str(tmp_path / "home"))
    yield made
    made.ledger.close()


def test_a_job_that_went_on_is_exported_again_to_its_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: HubServer, capfd: pytest.CaptureFixture[str]
) -> None:
    made = finished_job(
        tmp_path,
        FolderStore(tmp_path / "store"),
        [*LINES[:1], {**LINES[1], "example_id": "fails"}],
        seconds=0.1,
    )
    monkeypatch.setenv("SPEECH_DATABASE_URL", made.ledger.url)
    monkeypatch.setenv("SPEECH_HOME", str(tmp_path / "home"))
    job, push = (
        nightjar.find_job(made.job_id),
        ["export", made.job_id, "--format", "parquet", "--push", "birds/night"],
    )
    for filtered in (None, "seconds > 0"):
        assert job.to_datasets(where=filtered)["example_id"][:] == ["u0"]
    assert job.to_datasets(tmp_path / "of a person")["example_id"][:] == ["u0"]
    made.ledger.retry(made.job_id, None)
    run_all(made.ledger, made.store, made.job_id, 0.1, mended=True)
    assert main(push) == 0, capfd.readouterr().err
    for filtered in (None, "seconds > 0"):
        assert job.to_datasets(where=filtered)["example_id"][:] == ["u0", "fails"]
    with pytest.raises(ConfigError, match="with other items or options"):
        job.to_datasets(tmp_path / "of a person")
    made.ledger.close()


def test_splits_become_a_private_dataset(
    finished: Finished, hub: HubServer, capfd: pytest.CaptureFixture[str]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    options = [
        "--format",
        "parquet",
        "--split",
        "train=0.5,dev=0.5",
        "--push",
        "birds/night",
        "--private",
        "--json",
    ]
    assert main(["export", finished.job_id, *options]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["pushed"] == f"{hub.url}/datasets/birds/night"
    assert hub.made["birds/night"]["visibility"] == "private"
    files = hub.repositories["birds/night"]
    assert {name.split("-")[0] for name in files} == {"README.md", "data/train", "data/dev"}
    rows = [
        row
        for name, data in files.items()
        if name != "README.md"
        for row in parquet.read_table(io.BytesIO(data)).to_pylist()
    ]
    rows.sort(key=lambda row: row["index"])
    assert [row["audio"]["bytes"] for row in rows] == list(finished.audio.values())
    assert [(row["example_id"], row["seed"]) for row in rows] == [
        (f"u{index}", index + 2**62) for index in range(6)
    ]
    assert TOKEN not in said.out + said.err


@pytest.mark.parametrize(
    ("fault", "kind", "code", "message"),
    [
        ("no token", ConfigError, ErrorCode.CONFIG_INVALID, "There is no token"),
        (
            "another token",
            ConfigError,
            ErrorCode.CONFIG_INVALID,
            r"refuses to write 'birds/night' \(status 401\)",
        ),
        ("a bad name", ConfigError, ErrorCode.CONFIG_INVALID, "does not accept the dataset name 'a/b/c'"),
        ("another format", ConfigError, ErrorCode.CONFIG_INVALID, "Only an export in the format parquet"),
        ("offline", ServiceError, ErrorCode.SERVER_UNREACHABLE, "while HF_HUB_OFFLINE is set"),
        ("nobody there", ServiceError, ErrorCode.SERVER_UNREACHABLE, "does not answer"),
        ("broken", ServiceError, ErrorCode.SERVER_UNREACHABLE, "answers with status 500"),
    ],
)
def test_what_keeps_a_push_from_happening(
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    kind: type[NightjarError],
    code: ErrorCode,
    message: str,
) -> None:
    if fault == "no token":
        monkeypatch.delenv("HF_TOKEN")
    if fault == "another token":
        monkeypatch.setenv("HF_TOKEN", "hf_other")
    if fault == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if fault == "nobody there":
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    hub.status = 500 if fault == "broken" else None
    with pytest.raises(kind, match=message) as caught:
        check_push(
            "nemo" if fault == "another format" else "parquet",
            "to",
            "a/b/c" if fault == "a bad name" else "birds/night",
        )
    assert caught.value.code is code
    assert caught.value.advice
    assert "hf_" not in caught.value.message


def test_nothing_is_exported_that_cannot_be_pushed(
    finished: Finished, hub: HubServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    to = finished.folder / "to"
    assert (
        main(["export", finished.job_id, "--format", "parquet", "--to", str(to), "--push", "birds/night"])
        != 0
    )
    assert "There is no token for the Hugging Face hub." in capfd.readouterr().err
    assert not to.exists()
    assert not hub.repositories
