"""Pools of voices: which voice a dialogue, a role or a speaker gets, and what is read and refused."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jobs.job_options import SubmitOptions, checked_options, job_of, options_of
from jobs.ledger.records import JobSpec, VoicePool
from jobs.settings import load_settings
from jobs.source import open_source
from jobs.spec import ResolvedSpec, resolve
from jobs.voices import MAX_POOL_VOICES, VoiceDraws, read_pool, voice_folder
from nightjar.inputs import written_input
from pipelines.errors import ConfigError, ErrorCode, NightjarError
from pipelines.registry import register_pipeline
from pipelines.request import Capabilities
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.serving_kit import wav

NAMES = tuple(f"v{number:03}" for number in range(1000))
CARD = replace(fake_card("many"), capabilities=Capabilities(voices=NAMES, cloning=True))


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    forget = register_pipeline("many", CARD, FakePipeline)
    yield
    forget()


def line(name: str, *texts: tuple[str, str], **more: Any) -> str:
    return json.dumps(
        {"example_id": name, "messages": [[role, "text", text] for role, text in texts], **more}
    )


def resolved(lines: Iterable[str], name: str = "in.jsonl", **options: Any) -> ResolvedSpec:
    Path(name).write_text("".join(one + "\n" for one in lines))
    spec, submitted = job_of(checked_options({"model": "many", **options}))
    return resolve(spec, submitted.input_format)


def voices_of(lines: Iterable[str], name: str = "in.jsonl", **options: Any) -> dict[str, dict[str, str]]:
    """Example id -> role -> voice."""
    spec = resolved(lines, name, **options)
    with open_source(name) as source:
        records = spec.of_input(source).records(source)
        read = [json.loads(record) for record in records.lines() if isinstance(record, bytes) and record]
        again = [json.loads(record) for record in records.lines() if isinstance(record, bytes) and record]
    assert read == again
    return {
        one["example_id"]: {
            role: own["voice"] for role, own in one.get("generation", {}).get("roles", {}).items()
        }
        for one in read
    }


def plain(count: int) -> list[str]:
    return [line(f"e{number}", ("user", "Good evening.")) for number in range(count)]


def test_shares_are_those_of_the_weights() -> None:
    weights = {name: 3.0 if number < 500 else 1.0 for number, name in enumerate(NAMES)}
    drawn = Counter(
        one["user"]
        for one in voices_of(
            plain(20_000), voices=",".join(f"{name}={weight}" for name, weight in weights.items())
        ).values()
    )
    heavy = sum(drawn[name] for name in NAMES[:500]) / 20_000
    assert abs(heavy - 0.75) < 0.01
    total = sum(weights.values())
    assert max(abs(drawn[name] / 20_000 - weights[name] / total) for name in NAMES) < 0.01
    # Chance alone leaves a voice of weight 3 out of 20,000 draws in one of 10^13 cases.
    assert set(NAMES[:500]) <= drawn.keys()


def test_a_draw_depends_on_seed_and_id_and_not_on_the_order() -> None:
    lines = plain(200)
    found = voices_of(lines, voices="v001,v002,v003")
    assert voices_of(lines[::-1], voices="v003,v001,v002") == found
    assert voices_of(lines[50:60], voices="v001,v002,v003") == {
        f"e{n}": found[f"e{n}"] for n in range(50, 60)
    }
    assert voices_of(lines, voices="v001,v002,v003", seed=1) != found


def test_the_voices_of_a_seed_stay_as_they_are() -> None:
    draws = VoiceDraws(VoicePool({"anna": 1.0, "ben": 2.0, "cleo": 1.0}), 7)
    found = [draws.of(f"e{number}", "user") for number in range(8)]
    assert found == FIXED


#: Recorded once: jobs that are continued draw again.
FIXED = ["ben", "ben", "ben", "cleo", "ben", "ben", "ben", "ben"]


@pytest.mark.parametrize("balance", [False, True])
def test_the_roles_of_a_dialogue_have_different_voices(balance: bool) -> None:
    lines = [
        line(f"e{number}", ("user", "Are you there?"), ("assistant", "I am."), ("user", "Good."))
        for number in range(300)
    ]
    found = voices_of(lines, voices="v001=5,v002,v003", speak="all", balance=balance)
    assert all(one["user"] != one["assistant"] for one in found.values())
    assert {voice for one in found.values() for voice in one.values()} == {"v001", "v002", "v003"}
    assert all(
        one["user"] == one["assistant"] == "v001"
        for one in voices_of(lines, voices="v001", speak="all").values()
    )


def test_a_second_role_keeps_the_weights_of_the_other_voices() -> None:
    lines = [line(f"e{n}", ("user", "One."), ("assistant", "Two.")) for n in range(6000)]
    found = Counter(
        (one["assistant"], one["user"])
        for one in voices_of(lines, voices="v001=2,v002=1,v003=1", speak="all").values()
    )
    # The assistant draws first, then the user from the others.
    expected = {("v001", "v002"): 1 / 4, ("v002", "v001"): 1 / 6, ("v002", "v003"): 1 / 12}
    for pair, share in expected.items():
        assert abs(found[pair] / 6000 - share) < 0.02, pair


def test_only_spoken_roles_without_a_voice_draw_one() -> None:
    audio = {"messages": [["user", "audio", "a.wav"], ["user", "text", "Hello."]], "example_id": "cloned"}
    lines = [
        line("own", ("user", "Hello."), generation={"voice": "v009"}),
        line(
            "role", ("user", "Hi."), ("assistant", "Hi."), generation={"roles": {"user": {"voice": "v001"}}}
        ),
        line("kept", ("user", "Hi."), generation={"roles": {"user": {"temperature": 0.5}}, "seed": 4}),
        json.dumps(audio),
        "{broken",
    ]
    read = resolved(lines, voices="v001,v002", speak="all")
    with open_source("in.jsonl") as source:
        own, role, kept, cloned, broken = read.of_input(source).records(source).lines()
    assert (own, cloned, broken) == (lines[0].encode(), lines[3].encode(), lines[4].encode())
    assert isinstance(role, bytes)
    assert isinstance(kept, bytes)
    assert json.loads(role)["generation"]["roles"] == {
        "user": {"voice": "v001"},
        "assistant": {"voice": "v002"},
    }
    seen = json.loads(kept)["generation"]
    assert (seen["seed"], seen["roles"]["user"]["temperature"]) == (4, 0.5)
    assert "voice" in seen["roles"]["user"]


def test_a_line_without_settings_keeps_its_bytes() -> None:
    raw = '{"n": 1.50, "example_id": "e", "messages": [["user", "text", "café"]], "x": [1e40] }'
    Path("in.jsonl").write_text(raw + "\n")
    with open_source("in.jsonl") as source:
        (record,) = resolved([raw], voices="v001").of_input(source).records(source).lines()
    assert isinstance(record, bytes)
    assert record.startswith(raw[:-2].encode())
    assert json.loads(record)["generation"] == {"roles": {"user": {"voice": "v001"}}}


def test_balance_gives_each_voice_the_text_of_its_weight() -> None:
    lines = [line(f"e{n}", ("user", "a" * (1 + n * 37 % 90))) for n in range(3000)]
    found = voices_of(lines, voices="v001=2,v002,v003", balance=True)
    spoken: Counter[str] = Counter()
    for number in range(3000):
        spoken[found[f"e{number}"]["user"]] += 1 + number * 37 % 90
    total = sum(spoken.values())
    assert all(abs(spoken[name] / total - share) < 0.001 for name, share in (("v001", 0.5), ("v002", 0.25)))


def test_balance_gives_the_longer_role_of_a_dialogue_to_the_voice_with_less_text() -> None:
    lines = [line(f"e{n}", ("user", "a" * (60 + n % 7)), ("assistant", "Yes.")) for n in range(300)]
    found = voices_of(lines, voices="v001=2,v002,v003,v004", speak="all", balance=True)
    spoken: Counter[str] = Counter()
    for number in range(300):
        spoken[found[f"e{number}"]["user"]] += 60 + number % 7
        spoken[found[f"e{number}"]["assistant"]] += 4
    total = sum(spoken.values())
    assert all(abs(spoken[name] / total - share) < 0.01 for name, share in (("v001", 0.4), ("v002", 0.2)))


def test_each_speaker_of_a_table_has_one_voice() -> None:
    rows = ["id,text,speaker", *(f"r{n},Hello.,s{n % 20}" for n in range(200))]
    spec = resolved(rows, "in.csv", voices="v001,v002,v003", voices_by="speaker")
    with open_source("in.csv") as source:
        read = [json.loads(one) for one in spec.of_input(source).records(source).lines() if one]  # type: ignore[arg-type]
    of_speaker = {number % 20: one["generation"]["voice"] for number, one in enumerate(read)}
    assert [one["generation"]["voice"] for one in read] == [of_speaker[n % 20] for n in range(200)]
    assert set(of_speaker.values()) == {"v001", "v002", "v003"}


def test_a_folder_and_a_table_give_recordings_and_texts(tmp_path: Path) -> None:
    (tmp_path / "pool" / "a").mkdir(parents=True)
    for name in ("a/one", "two"):
        (tmp_path / "pool" / f"{name}.wav").write_bytes(wav(1.0))
    (tmp_path / "pool" / "two.txt").write_text(" What two\nsays. ")
    (tmp_path / "pool" / "notes.md").write_text("no recording")
    pool, recordings = read_pool("pool")
    assert pool == VoicePool({"a/one": 1.0, "two": 1.0})
    assert {name: text for name, (_, text) in recordings.items()} == {"a/one": "", "two": "What two says."}
    (tmp_path / "pool" / "list.csv").write_text(
        "recording,text,weight,voice\na/one.wav,Said.,2.5,anna\n,,,v001\n"
    )
    pool, recordings = read_pool("pool/list.csv")
    assert pool.weights == {"anna": 2.5, "v001": 1.0}
    assert recordings == {"anna": (Path("pool/a/one.wav"), "Said.")}


def test_the_recordings_become_part_of_the_spec(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "Anna B.wav").write_bytes(wav(1.0))
    (tmp_path / "pool" / "Anna B.txt").write_text("Anna speaks.")
    spec, options = job_of(checked_options({"model": "many", "voices": "pool"}))
    found = resolve(spec, "dialogues", voice_folder(load_settings(home="out"), options.recordings)).spec
    assert isinstance(found.stored_voices, dict)
    assert found.stored_voices["Anna B"].text == "Anna speaks."
    assert msgspec.json.decode(msgspec.json.encode(found), type=JobSpec) == found


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("", "'' cannot be the name"),
        ("anna,anna", "occurs twice"),
        ("speakers/", "no such folder or file"),
        ("speakers.csv", "no such folder or file"),
        ("anna=0", "no weight"),
        ("anna=nan", "no weight"),
        ("anna=inf", "no weight"),
        ("anna=x", "no weight"),
        ("a\tb", "cannot be the name"),
        ("x" * 201, "cannot be the name"),
        (",".join(f"n{number}" for number in range(MAX_POOL_VOICES + 1)), "more than 10,000 voices"),
    ],
)
def test_names_that_are_no_pool_are_refused(written: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_pool(written)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_files_that_are_no_pool_are_refused(tmp_path: Path) -> None:
    Path("empty").mkdir()
    Path("bare.csv").write_text("name\nanna\n")
    Path("binary.csv").write_bytes(b"\xff\xfe\x00")
    for which, words in (
        ("empty", "no voice"),
        ("bare.csv", "neither a column"),
        ("binary.csv", "cannot be"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_pool(which)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"voices": "v001", "voice": "v002"}, "another voice"),
        ({"voices": "v001", "voice_of": {"user": "v002"}}, "another voice"),
        ({"voices": "v001", "voices_by": "speaker", "balance": True}, "cannot be balanced"),
        ({"balance": True}, "no pool"),
        ({"voices_by": "speaker"}, "no pool"),
        ({"voices": "nobody"}, "no voice 'nobody'"),
    ],
)
def test_options_that_do_not_fit_a_pool_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(NightjarError, match=words):
        resolved(plain(1), **options)


def test_a_speaker_without_a_name_and_a_list_without_speakers_are_refused() -> None:
    spec = resolved(["id,text,speaker", "r1,Hello.,"], "in.csv", voices="v001", voices_by="speaker")
    with open_source("in.csv") as source:
        found = [*spec.of_input(source).records(source).lines()]
    assert getattr(found[1], "code", None) is ErrorCode.INPUT_UNKNOWN_VOICE
    assert "--voice-for" not in str(found[1])
    plainly = resolved(plain(1), voices="v001", voices_by="speaker")
    with open_source("in.jsonl") as source, pytest.raises(NightjarError, match="names no speakers"):
        plainly.of_input(source)


@pytest.mark.parametrize(
    ("name", "written", "weights"),
    [
        ("l.csv", "voice,weight\nanna,2\n\n,\nben,1\n", {"anna": 2.0, "ben": 1.0}),
        ("l.csv", "\ufeffvoice;weight\nanna;2\n", {"anna": 2.0}),
        ("l.csv", "voice, weight\n anna , 2\n", {"anna": 2.0}),
        ("l.TSV", 'voice\ttext\tweight\nanna\t"Hello" she said.\t2\n', {"anna": 2.0}),
    ],
)
def test_a_table_of_a_spreadsheet_is_read(name: str, written: str, weights: dict[str, float]) -> None:
    Path(name).write_text(written)
    assert read_pool(name)[0].weights == weights


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("recording,text\na.wav,Hello, how are you?\n", "line 2 has 3 fields, but the header has 2"),
        ("voice,weight\nanna\n", "line 2 has 1 fields"),
        ("voice,recording,weight\n,,2\n", "'' cannot be the name of a voice: it must have"),
        ("voice,weight\nanna,1e308\nben,1e308\n", "sum of its weights"),
        (f"voice,text\nanna,{'x' * 5001}\n", "the text of line 2 has more than 5,000 characters"),
    ],
)
def test_a_table_that_would_be_misread_is_refused(written: str, words: str) -> None:
    Path("l.csv").write_text(written)
    with pytest.raises(ConfigError, match=words):
        read_pool("l.csv")


def test_odd_files_of_a_folder_are_left_out_or_named() -> None:
    Path("pool/d.wav").mkdir(parents=True)
    os.mkfifo("pool/f.wav")
    Path("pool/.hidden").mkdir()
    for name in ("._anna.wav", "..wav", ".hidden/b.wav", "anna.WAV"):
        Path("pool", name).write_bytes(wav(1.0))
    Path("pool/anna.txt").write_bytes(b"\xef\xbb\xbfAnna speaks.")
    assert {name: text for name, (_, text) in read_pool("pool")[1].items()} == {"anna": "Anna speaks."}
    with Path("pool/anna.txt").open("wb") as file:
        file.truncate(1 << 32)
    with pytest.raises(ConfigError, match=r"text of anna\.txt has more than 5,000"):
        read_pool("pool")
    Path("pool/anna.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"text anna\.txt is not UTF-8"):
        read_pool("pool")
    Path("pool/anna.txt").unlink()
    Path("pool/ anna.wav").write_bytes(wav(1.0))
    with pytest.raises(ConfigError, match="without a space at an end"):
        read_pool("pool")


def test_two_names_of_one_voice_of_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="'V001' and 'v001' are the same voice"):
        resolved(plain(1), voices="V001,v001")
    Path("pool").mkdir()
    Path("pool/V001.wav").write_bytes(wav(1.0))
    spec, options = job_of(checked_options({"model": "many", "voices": "pool"}))
    with pytest.raises(ConfigError, match="'V001' of the pool has the name of a voice of the model"):
        resolve(spec, "dialogues", voice_folder(load_settings(home="out"), options.recordings))


def test_the_other_parts_of_a_line_with_settings_keep_their_bytes() -> None:
    raw = '{"example_id": "e", "messages": [["user", "text", "Hi"]], "x": [1e999, 1.50, 123456789012345678901], "generation": {"top_p": 0.50}}'
    Path("in.jsonl").write_text(raw + "\n")
    with open_source("in.jsonl") as source:
        (record,) = resolved([raw], voices="v001").of_input(source).records(source).lines()
    assert isinstance(record, bytes)
    assert b"[1e999, 1.50, 123456789012345678901]" in record
    assert b'"generation":{"top_p":0.50,"roles":{"user":{"voice":"v001"}}}' in record


def test_the_weights_of_the_command_are_exact() -> None:
    weights = {"v001": 0.1234567, "v002": 12345678.0, "v003": 1e-300}
    spec = resolved(plain(1), voices=",".join(f"{name}={weight!r}" for name, weight in weights.items())).spec
    written = options_of(spec, SubmitOptions())["voices"]
    assert written == "v001=0.1234567,v002=12345678,v003=1e-300"
    assert read_pool(written)[0].weights == weights


def test_the_recording_of_a_row_takes_precedence_over_the_voice_of_its_speaker() -> None:
    rows = ["id,text,speaker,reference_audio", "r1,Hello.,s1,a.wav", "r2,Hello.,,a.wav", "r3,Hello.,s1,"]
    spec = resolved(rows, "in.csv", voices="v001", voices_by="speaker")
    with open_source("in.csv") as source:
        read = [json.loads(one) for one in spec.of_input(source).records(source).lines() if one]  # type: ignore[arg-type]
    assert [one.get("generation") for one in read] == [None, None, {"voice": "v001"}]


def test_chats_of_a_table_are_refused_with_a_voice_for_each_speaker() -> None:
    rows = ["messages,speaker", '"[{""role"": ""user"", ""content"": ""Hi""}]",s1']
    spec = resolved(rows, "in.csv", voices="v001,v002", voices_by="speaker")
    with open_source("in.csv") as source, pytest.raises(NightjarError, match="name no speakers"):
        [*spec.of_input(source).records(source).lines()]
    with pytest.raises(NightjarError, match="Record 1: A dialogue names no speaker"):
        written_input([json.loads(line("e", ("user", "Hi")))], spec.spec, Path("state"))
