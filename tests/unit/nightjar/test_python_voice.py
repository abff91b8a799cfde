"""An open model and what it says: wrong arguments are one sentence with a code, and no error of Python or
of a library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

import nightjar
from pipelines.errors import ConfigError, ErrorCode, StoreError, SynthesisError
from pipelines.registry import register_pipeline
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline


@pytest.fixture
def voice() -> Iterator[nightjar.Voice]:
    forget = register_pipeline("fake", fake_card(), lambda **_: FakePipeline())
    with nightjar.open_model("fake") as voice:
        yield voice
    forget()


@pytest.mark.parametrize("text", [["Good evening."], b"Good evening.", 5, None])
def test_what_is_no_text_is_not_spoken(voice: nightjar.Voice, text: Any) -> None:
    for speak in (voice.speak, lambda text: list(voice.stream(text))):
        with pytest.raises(ConfigError, match=r"The argument `text` is .* Give one text") as caught:
            speak(text)
        assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_a_reference_is_a_path_or_bytes(voice: nightjar.Voice) -> None:
    with pytest.raises(ConfigError, match="The argument `reference` is 5"):
        voice.speak("Hello.", reference=5)


def test_a_closed_model_says_that_it_was_closed(voice: nightjar.Voice) -> None:
    voice.close()
    for speak in (voice.speak, lambda text: list(voice.stream(text))):
        with pytest.raises(SynthesisError, match="The model fake was closed") as caught:
            speak("Hello.")
        assert caught.value.code is ErrorCode.SYNTH_ABORTED
        assert "open_model" in caught.value.advice


def test_the_name_of_a_model_is_a_text() -> None:
    with pytest.raises(ConfigError, match="The argument `model` is 5"):
        nightjar.open_model(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["x.wav", "x.flac", "x.mp3", "x.opus", "X.WAV"])
def test_a_sound_is_saved_in_the_format_of_its_path(tmp_path: Path, name: str) -> None:
    sound = nightjar.Sound(np.sin(np.arange(24_000, dtype=np.float32) / 20) / 2, 24_000)  # type: ignore[arg-type]
    path = sound.save(str(tmp_path / name))
    assert soundfile.info(str(path)).duration == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("path", "rate", "kind", "words"),
    [
        ("x.xyz", 24_000, ConfigError, "Unknown audio format"),
        ("x", 24_000, ConfigError, "Unknown audio format"),
        (5, 24_000, ConfigError, "The argument `path` is 5"),
        ("x.opus", 44_100, ConfigError, "no sample rate of 44100 Hz"),
        ("none/x.wav", 24_000, StoreError, "cannot be written: No such file or directory"),
    ],
)
def test_a_sound_that_cannot_be_saved_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: Any,
    rate: int,
    kind: type[nightjar.NightjarError],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=words):
        nightjar.Sound(np.zeros(100, np.float32), rate).save(path)
    assert list(tmp_path.iterdir()) == []
