"""Every option of a job, said in Python and on the command line, becomes the field that it is named after,
and no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest

import nightjar
from jobs.checks import Quality, checks_of_codes, quality_of
from jobs.cli.options import job_options
from jobs.job_options import SubmitOptions, checked_options, job_of, settable, user_name
from jobs.ledger.records import JobSpec, Reading, VoicePool
from pipelines.request import Generation
from tests.support.field_tables import changed, fields_of

LONG_PAUSES = ("bounds.pause.high=2",)
BASIC_OF_CODES = checks_of_codes(quality_of("basic") or Quality())

#: What is said in Python, what on the command line, and the fields that differ then from those of a job of
#: which nothing is said.
ROWS: tuple[tuple[dict[str, Any], Sequence[str], dict[str, Any]], ...] = (
    ({"model": "spark-tts-0.5b"}, ["--model", "spark-tts-0.5b"], {"spec.model": "spark-tts-0.5b"}),
    ({"voice": "heart"}, ["--voice", "heart"], {"spec.generation.voice": "heart"}),
    ({"language": "German"}, ["--language", "German"], {"spec.generation.language": "German"}),
    ({"instruct": "softly"}, ["--instruct", "softly"], {"spec.generation.instruct": "softly"}),
    (
        {"voice_of": {"assistant": "sky"}},
        ["--voice-of", "assistant=sky"],
        {"spec.generation.roles": {"assistant": Generation(voice="sky")}},
    ),
    ({"voice_for": {"*": "sky"}}, ["--voice-for", "*=sky"], {"spec.reading.voices": {"*": "sky"}}),
    (
        {"voices": "sky=2,heart"},
        ["--voices", "sky=2,heart"],
        {"spec.pool": VoicePool({"sky": 2.0, "heart": 1.0})},
    ),
    (
        {"voices": "sky", "voices_by": "speaker"},
        ["--voices-by", "speaker", "--voices", "sky"],
        {"spec.pool": VoicePool({"sky": 1.0}, by_speaker=True)},
    ),
    (
        {"voices": "sky", "balance": True},
        ["--balance", "--voices", "sky"],
        {"spec.pool": VoicePool({"sky": 1.0}, balance=True)},
    ),
    ({"speak": "all"}, ["--speak", "all"], {"spec.speak": "all"}),
    ({"seed": 5}, ["--seed", "5"], {"spec.seed": 5}),
    ({"format": "flac"}, ["--format", "flac"], {"spec.format": "flac"}),
    (
        {"output": "codes"},
        ["--output", "codes"],
        {"spec.output": "codes", "spec.quality": BASIC_OF_CODES},
    ),
    ({"sample_rate": 16_000}, ["--sample-rate", "16000"], {"spec.sample_rate": 16_000}),
    ({"qa": "off"}, ["--qa", "off"], {"spec.quality": None}),
    (
        {"qa_config": "qa.toml"},
        ["--qa-config", "qa.toml"],
        {"spec.quality": quality_of("basic", None, LONG_PAUSES)},
    ),
    (
        {"qa_set": LONG_PAUSES},
        ["--qa-set", *LONG_PAUSES],
        {"spec.quality": quality_of("basic", None, LONG_PAUSES)},
    ),
    (
        {"qa": "strict", "qa_sample": "5%"},
        ["--qa-sample", "0.05", "--qa", "strict"],
        {"spec.quality": quality_of("strict", None, ["sample=0.05"])},
    ),
    (
        {"qa": "strict", "qa_max_failure_rate": 0.02},
        ["--qa-max-failure-rate", "2%", "--qa", "strict"],
        {"spec.quality": quality_of("strict", None, ["max_failure_rate=0.02"])},
    ),
    ({"limit": 3}, ["--limit", "3"], {"spec.reading.limit": 3}),
    ({"sample": 4}, ["--sample", "4"], {"spec.reading.sample": 4}),
    ({"keep": ["a", "b, c"]}, [], {"spec.reading.keep": ["a", "b, c"]}),
    ({"keep": "a, b"}, ["--keep", "a,b"], {"spec.reading.keep": ["a", "b"]}),
    ({"drop": "*"}, ["--drop", "*"], {"spec.reading.drop": ["*"]}),
    ({"columns": {"text": "said"}}, ["--column", "text=said"], {"spec.reading.columns": {"text": "said"}}),
    ({"input_format": "text"}, ["--input-format", "text"], {"options.input_format": "text"}),
    ({"on_error": "abort"}, ["--on-error", "abort"], {"options.on_error": "abort"}),
    ({"pack": True}, ["--pack"], {"spec.pack": True}),
    ({"timestamps": True}, ["--timestamps"], {"spec.timestamps": True}),
    ({"name": "A night"}, ["--name", "A night"], {"options.name": "A night"}),
    ({"labels": {"corpus": "news"}}, ["--label", "corpus=news"], {"options.labels": {"corpus": "news"}}),
    ({"priority": 7}, ["--priority", "7"], {"options.priority": 7}),
    ({"weight": 9}, ["--set", "weight=9"], {"options.weight": 9}),
    ({"max_attempts": 5}, ["--set", "max_attempts=5"], {"options.max_attempts": 5}),
    ({"max_in_flight": 6}, ["--set", "max_in_flight=6"], {"options.max_in_flight": 6}),
    ({"error_budget": 0.25}, ["--set", "error_budget=0.25"], {"options.error_budget": 0.25}),
    ({"normalize": "en"}, ["--set", "normalize=en"], {"spec.normalize": "en"}),
    ({"lexicon": "words.csv"}, ["--set", "lexicon=words.csv"], {"spec.lexicon": {"SQL": "sequel"}}),
    ({"idempotency_key": "k"}, ["--idempotency-key", "k"], {"options.idempotency_key": "k"}),
    ({"generation": {"seed": 8}}, [], {"spec.generation.seed": 8}),
    (
        {"generation": {"reference_text": "Said."}},
        ["--set", "reference_text=Said."],
        {"spec.generation.reference_text": "Said."},
    ),
    (
        {"generation": {"temperature": 0.7}},
        ["--set", "temperature=0.7"],
        {"spec.generation.temperature": 0.7},
    ),
    ({"generation": {"top_k": 11}}, ["--set", "top_k=11"], {"spec.generation.top_k": 11}),
    ({"generation": {"top_p": 0.8}}, ["--set", "top_p=0.8"], {"spec.generation.top_p": 0.8}),
    (
        {"generation": {"repetition_penalty": 1.1}},
        ["--set", "repetition_penalty=1.1"],
        {"spec.generation.repetition_penalty": 1.1},
    ),
    ({"generation": {"cfg": 3.0}}, ["--set", "cfg=3"], {"spec.generation.cfg": 3.0}),
    (
        {"generation": {"max_seconds": 12.0}},
        ["--set", "max_seconds=12"],
        {"spec.generation.max_seconds": 12.0},
    ),
    (
        {"generation": {"mode": "text_audio"}},
        ["--set", "mode=text_audio"],
        {"spec.generation.mode": "text_audio"},
    ),
    (
        {"generation": {"text_temperature": 0.2}},
        ["--set", "text_temperature=0.2"],
        {"spec.generation.text_temperature": 0.2},
    ),
    (
        {"generation": {"audio_temperature": 0.3}},
        ["--set", "audio_temperature=0.3"],
        {"spec.generation.audio_temperature": 0.3},
    ),
    ({"generation": {"audio_top_k": 13}}, ["--set", "audio_top_k=13"], {"spec.generation.audio_top_k": 13}),
    ({"generation": {"max_tokens": 99}}, ["--set", "max_tokens=99"], {"spec.generation.max_tokens": 99}),
)
#: Fields that nobody says: submit itself fills them in.
FOUND = {
    "spec.normalizer",
    "spec.model_revision",
    "spec.stored_voices",
    "spec.reading.speakers_sha256",
    "options.owner",
    "options.recordings",
}


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qa.toml").write_text("bounds.pause.high = 2")
    Path("words.csv").write_text("SQL,sequel")


@click.command()
@job_options
def command(spec: JobSpec, options: SubmitOptions, dry_run: bool) -> dict[str, Any]:
    """A command with the options of a job."""
    return by_path(spec, options)


def by_path(spec: JobSpec, options: SubmitOptions) -> dict[str, Any]:
    named = (("spec", spec), ("options", options))
    return {
        f"{of}.{path}": value
        for of, whole in named
        for path, value in fields_of(whole, Quality, VoicePool).items()
    }


def in_python(**options: Any) -> dict[str, Any]:
    return by_path(*job_of(checked_options(nightjar.JobOptions(**options)), user_name()))


def on_the_command_line(*arguments: str) -> dict[str, Any]:
    return command.main(list(arguments), standalone_mode=False)


def identity(row: tuple[dict[str, Any], Sequence[str], dict[str, Any]]) -> str:
    return ",".join(row[2])


@pytest.mark.parametrize("row", ROWS, ids=identity)
def test_an_option_becomes_its_field_and_no_other(
    row: tuple[dict[str, Any], Sequence[str], dict[str, Any]],
) -> None:
    said, arguments, expected = row
    assert changed(in_python(), in_python(**said)) == expected
    if arguments:
        assert changed(on_the_command_line(), on_the_command_line(*arguments)) == expected


def test_no_option_and_no_field_is_missing_in_the_table() -> None:
    assert {name for said, _, _ in ROWS for name in said} == set(nightjar.JobOptions.__annotations__)
    named = {
        parameter.name
        for _, arguments, _ in ROWS
        if arguments
        for parameter in command.params
        if arguments[0] in parameter.opts
    }
    assert named | {"dry_run"} == {parameter.name for parameter in command.params}
    assert {arguments[1].partition("=")[0] for _, arguments, _ in ROWS if arguments[:1] == ["--set"]} == set(
        settable()
    )
    reached = {path for _, _, expected in ROWS for path in expected}
    assert reached | FOUND == set(by_path(JobSpec("m", reading=Reading()), SubmitOptions()))
    assert in_python() == on_the_command_line()
    assert in_python()["spec.speak"] == "auto"
