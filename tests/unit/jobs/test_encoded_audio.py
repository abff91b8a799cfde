"""A job's own audio format: refused where it cannot be, absent from specs that do not ask, and counted as
readers get it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile
from click.testing import CliRunner

import nightjar
from jobs import encoded_audio as encoded_audio_module
from jobs.cli import cli
from jobs.encoded_audio import encoded_audio, encoder
from jobs.ingest import dry_run
from jobs.ledger.records import JobSpec, Reading
from jobs.settings import Settings
from jobs.spec import frozen_spec, spec_sha
from jobs.store import FolderStore
from pipelines.audio import decode, encode
from pipelines.audio_format import AUDIO_FORMATS, RATES_OF
from pipelines.errors import ConfigError, ErrorCode, SynthesisError
from pipelines.registry import ModelCard, register_pipeline
from pipelines.request import Generation, Speech
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline, sine

LINE = '{"example_id": "a", "messages": [["user", "text", "Hello there."]]}\n'


def test_a_spec_that_asks_for_no_sample_rate_has_the_hash_it_always_had() -> None:
    assert msgspec.json.encode(JobSpec("hibari")) == (
        b'{"model":"hibari","model_revision":"","generation":{},"seed":0,"format":"wav","quality":null,"speak":"auto"}'
    )
    assert spec_sha(JobSpec("hibari")) == "b2d0c77dbb328cdefc5766cfc0fb675d6f07d7fadc6a20a64fe97c41fa561031"
    full = JobSpec("hibari", "1", Generation(voice="heart"), 7, "flac", pack=True, reading=Reading(limit=3))
    assert spec_sha(full) == "b6181308bc02dbe8c75c7948dd12279c58103584b050168bf2d3c3608edb8e6b"
    assert (
        len(
            {spec_sha(JobSpec("hibari", sample_rate=rate)) for rate in (8_000, 16_000)}
            | {spec_sha(JobSpec("hibari"))}
        )
        == 3
    )


def card_of(sample_rate: int) -> ModelCard:
    return replace(fake_card(), sample_rate=sample_rate)


@pytest.mark.parametrize(
    ("audio_format", "asked", "model_rate", "words"),
    [
        ("opus", None, 44_100, "8000, 12000, 16000, 24000 or 48000 Hz, or the format flac"),
        ("opus", 22_050, 24_000, "8000, 12000, 16000, 24000 or 48000 Hz, or the format flac"),
        ("mp3", 20_000, 24_000, "22050, 24000, 32000, 44100 or 48000 Hz, or the format flac"),
    ],
)
def test_a_format_that_cannot_be_is_refused_with_what_to_use(
    audio_format: str, asked: int | None, model_rate: int, words: str
) -> None:
    spec = JobSpec("fake", format=audio_format, sample_rate=msgspec.UNSET if asked is None else asked)
    with pytest.raises(ConfigError) as caught:
        frozen_spec(spec, card_of(model_rate))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert words in caught.value.advice


def test_what_can_be_is_frozen_as_it_was_asked_for() -> None:
    for audio_format in AUDIO_FORMATS:
        for rate in RATES_OF.get(audio_format, (8_000, 12_345, 48_000)):
            assert (
                frozen_spec(
                    JobSpec("fake", format=audio_format, sample_rate=rate), card_of(44_100)
                ).sample_rate
                == rate
            )
    assert frozen_spec(JobSpec("fake", format="mp3"), card_of(44_100)).sample_rate is msgspec.UNSET


@pytest.mark.parametrize("command", ["submit", "run"])
def test_the_command_line_refuses_before_anything_is_made(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(LINE)
    for options in (["--sample-rate", "7999"], ["--sample-rate", "many"], ["--format", "mp4"]):
        assert CliRunner().invoke(cli, [command, "in.jsonl", *options]).exit_code == 2
    refused = CliRunner().invoke(cli, [command, "in.jsonl", "--format", "opus", "--sample-rate", "44100"])
    assert isinstance(refused.exception, ConfigError)
    assert "opus has no sample rate of 44100 Hz" in str(refused.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_python_refuses_it_too() -> None:
    with pytest.raises(ConfigError, match="mp3 has no sample rate of 20000 Hz"):
        nightjar.run(["Hello."], format="mp3", sample_rate=20_000)


@pytest.mark.parametrize("audio_format", AUDIO_FORMATS)
@pytest.mark.parametrize("rate", [None, 8_000, 24_000, 48_000])
def test_facts_are_those_of_the_stored_file(audio_format: str, rate: int | None) -> None:
    speech = Speech(sine("some text that is spoken", 3), 16_000)
    given = speech.samples, 16_000, audio_format, rate
    made = encoded_audio(*given)
    samples, found = soundfile.read(io.BytesIO(made.data))
    assert (made.samples, made.sample_rate) == (len(samples), found)
    assert (found, made.facts["duration_ms"]) == (rate or 16_000, round(len(speech.samples) / 16))
    assert encoded_audio(*given) == made
    if rate is None and audio_format in ("wav", "flac"):
        assert made.data == encode(speech.samples, 16_000, audio_format)  # type: ignore[arg-type]


def test_samples_are_counted_in_the_file_that_was_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that does not say what it added: its readers get more."""
    longer = encode(np.zeros(16_000, np.float32), 16_000, "opus")
    monkeypatch.setattr(encoded_audio_module, "encode", lambda *_: longer)
    made = encoded_audio(sine("text", 3), 16_000, "opus")
    assert (made.samples, made.facts["duration_ms"]) == (16_000, 1000)


def test_speech_that_is_shorter_than_a_sample_is_no_audio() -> None:
    with pytest.raises(SynthesisError) as caught:
        encoded_audio(np.full(1, 0.1, np.float32), 48_000, "wav", 8_000)
    assert caught.value.code is ErrorCode.SYNTH_NO_AUDIO


def test_encoders_say_their_versions() -> None:
    library = f"libsndfile {soundfile.__libsndfile_version__}"
    assert str(encoder("opus")).startswith(f"{library}, libopus 1.")
    assert str(encoder("mp3")).startswith(f"{library}, LAME3.")
    assert (encoder("wav"), encoder("flac")) == (None, None)


def test_a_dry_run_knows_the_size_of_a_format(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(LINE.replace("Hello there.", "Hello there. " * 200))
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    sizes = {
        (audio_format, rate): dry_run(
            Settings(home=tmp_path),
            FolderStore(tmp_path / "store"),
            str(path),
            JobSpec("fake", format=audio_format, sample_rate=rate),
        ).bytes
        for audio_format in AUDIO_FORMATS
        for rate in RATES_OF["opus"]
    }
    forget()
    assert all(
        sizes["wav", rate] > sizes["flac", rate] > sizes["mp3", rate] > sizes["opus", rate]
        for rate in RATES_OF["opus"]
    )
    assert sizes["wav", 48_000] > 5.9 * sizes["wav", 8_000] > sizes["wav", 16_000]


def test_what_is_read_back_sounds_as_what_was_said() -> None:
    speech = Speech(sine("some text that is spoken", 3), 16_000)
    for audio_format in AUDIO_FORMATS:
        data = encoded_audio(speech.samples, 16_000, audio_format, 48_000).data
        samples, rate = decode(data, 16_000)
        assert (rate, len(samples)) == (16_000, len(speech.samples))
        assert np.corrcoef(samples, speech.samples)[0, 1] > 0.9
