"""What the command line advises, as Python says it."""

from __future__ import annotations

from pathlib import Path

import pytest

import nightjar
from jobs.embedded import EmbeddedHome, embedded_settings
from jobs.settings import load_settings
from nightjar.advice import in_python
from pipelines.errors import ErrorCode


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "Unset it. Then give the same command again to continue.",
            "Unset it. Then make the same call again to continue.",
        ),
        (
            "Stopped after 1 of 2 items. Give the same command to continue.",
            "Stopped after 1 of 2 items. Make the same call to continue.",
        ),
        ("Give a folder that you may write with --out.", "Give a folder that you may write with `out`."),
        ("If it is, say so: --input-format csv.", "If it is, say so: `input_format` csv."),
        (
            "Name the one with the text: --column text=NAME.",
            'Name the one with the text: `columns={"text": "NAME"}`.',
        ),
        (
            "Give all the others one with --voice-for '*=VOICE'.",
            'Give all the others one with `voice_for={"*": "VOICE"}`.',
        ),
        ("Choose `--qa basic` or leave `--qa` out.", 'Choose `qa="basic"` or leave `qa` out.'),
        # Commands to type.
        (
            "See why with: nightjar verify j --repair --out x.",
            "See why with: nightjar verify j --repair --out x.",
        ),
        (
            "See `nightjar errors j --out x`, and leave --limit out.",
            "See `nightjar errors j --out x`, and leave `limit` out.",
        ),
    ],
)
def test_options_are_arguments_and_commands_stay(said: str, expected: str) -> None:
    assert in_python(said) == expected
    assert in_python(expected) == expected


def test_a_run_beside_another_names_the_argument(tmp_path: Path) -> None:
    with (
        EmbeddedHome(embedded_settings(load_settings(home=str(tmp_path)))),
        pytest.raises(nightjar.NightjarError) as caught,
    ):
        nightjar.run(["Hello."], out=tmp_path, quiet=True)
    assert caught.value.code is ErrorCode.LEDGER_STATE
    assert caught.value.advice == "Wait for it, or give this run another folder with `out`."


def test_a_wrong_gpu_names_the_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(nightjar.NightjarError, match="name the GPUs: `gpu` 0,1"):
        nightjar.run(["Hello."], out=tmp_path, gpu="all", quiet=True)
