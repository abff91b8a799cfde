"""What is spoken of a text: a lexicon's words, and numbers in words. The store has one spoken text for retries,
repairs and exports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from damga import TextNormalizer

from jobs.checks import quality_of
from jobs.export.items import audio_items, facts
from jobs.export.manifest import put_manifest
from jobs.ledger.records import JobSpec
from jobs.shard_file import read_shard
from jobs.spec import resolve
from jobs.spoken_text import LIBRARY, MAX_ENTRIES, SpokenText, phonemes_of, read_lexicon
from pipelines.errors import ConfigError, ErrorCode
from pipelines.hibari import PHONEMES
from pipelines.pronunciation import WholeWords
from pipelines.registry import register_pipeline
from pipelines.request import Speech, SynthesisRequest, submit
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline, spoken_text
from tests.support.worker_rig import Rig

LEXICON = {
    "nginx": "engine ex",
    "SQL": "sequel",
    "New York": "Noo York",
    "New": "nu",
    "US": "U S",
    "24/7": "always",
    "C++": "see",
}


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("nginx, Nginx and NGINX", "engine ex, engine ex and engine ex"),
        ("SQL is not MySQL, SQLite, sql or _SQL", "sequel is not MySQL, SQLite, sql or _SQL"),
        ("New York is new, New\nYork is not", "Noo York is new, nu\nYork is not"),
        ("the US told us", "the U S told us"),
        ("open 24/7, not 124/7 or 24/78", "open always, not 124/7 or 24/78"),
        ("C++, C++11", "see, C++11"),
        ("nginx's (SQL)-“SQL”", "engine ex's (sequel)-“sequel”"),
        ("", ""),
    ],
)
def test_words_of_a_lexicon_are_whole_and_the_longest_counts(text: str, spoken: str) -> None:
    assert WholeWords(LEXICON).replaced(text, lambda _, said: said) == spoken


def test_a_word_in_the_case_of_the_text_comes_first() -> None:
    words = WholeWords({"polish": "pollish", "Polish": "pole ish"})
    assert words.replaced("polish Polish POLISH", lambda _, said: said) == "pollish pole ish pollish"
    assert words.found("We polish it.") == {"polish": "pollish"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("SQL,sequel\nSQL,ess\n", "row 2: 'SQL' has an earlier row"),
        ("SQL\n", "row 1: a row is a word and its spelling"),
        ("SQL,sequel,x\n", "row 1: a row is a word and its spelling"),
        ("\nSQL,\n", "row 2: a row is a word and its spelling"),
        ("word,spelling\n", "has no rows"),
        (
            "word,spelling,notes\nSQL,sequel,\n",
            "in row 1: a row is a word and its spelling, and the only header is",
        ),
        ("...,dots\n", "row 1: a lexicon has words with a letter or digit"),
        (f"SQL,{'x' * 201}\n", "row 1: a lexicon has words"),
        ("".join(f"w{n},x\n" for n in range(MAX_ENTRIES + 1)), f"row {MAX_ENTRIES + 1}: a lexicon has"),
        ("\n", "has no rows"),
        ('"SQL,sequel\n', "cannot be read"),
    ],
)
def test_a_bad_lexicon_is_refused_with_its_row(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "words.csv"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_lexicon(path)
    assert why in str(caught.value)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_no_more_of_a_file_is_read_than_a_lexicon_may_have(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    rows = "".join(f"w{n},x\n" for n in range(MAX_ENTRIES * 10))
    path.write_bytes(rows.encode() + b"\xff")
    with pytest.raises(ConfigError, match=f"row {MAX_ENTRIES + 1}: a lexicon has"):
        read_lexicon(path)


def test_a_lexicon_is_a_csv_or_tsv_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes('\ufeff"New York, NY",Noo York\r\n\r\nNightjar,/nˈItʤɑɹ/\r\n'.encode())
    assert read_lexicon(tmp_path / "a.csv") == {"New York, NY": "Noo York", "Nightjar": "/nˈItʤɑɹ/"}
    (tmp_path / "a.tsv").write_text('New York, NY\tNoo "York"\n')
    (tmp_path / "b.csv").write_text('word, spelling\nword,wurd\nspelling,"spell,ing"\n')
    assert read_lexicon(tmp_path / "b.csv") == {"word": "wurd", "spelling": "spell,ing"}
    assert read_lexicon(tmp_path / "a.tsv") == {"New York, NY": 'Noo "York"'}
    assert phonemes_of({"a": "/b/", "c": "/", "d": "e"}) == {"a": "b"}


WRITTEN = (
    ("It costs $12.50.", "It costs twelve dollars fifty cents."),
    ("He ran 5 km on 3 May 2024.", "He ran five kilometers on the third of May twenty twenty four."),
    ("Dr. Smith met Mr. Jones. They left.", "doctor Smith met mister Jones. They left."),
    ("First 1.\n\n  Second 2.", "First one.\n\n  Second two."),
    ("Plain words, “quoted” — and  spaces.", "Plain words, “quoted” — and  spaces."),
)


@pytest.mark.parametrize(("text", "spoken"), WRITTEN)
def test_numbers_are_spoken_in_words(text: str, spoken: str) -> None:
    said = SpokenText(JobSpec("m", normalize="en"))
    assert said.of(text, None) == said.of(text, "en-GB") == said.of(text, "English") == spoken
    assert said.of(text, "German") == text


def test_lines_that_skip_the_library_are_those_that_it_does_not_change() -> None:
    """The sentences of these texts without a digit, a sign or an abbreviation, and others with each kind of mark."""
    library = TextNormalizer(lang="en").normalize
    plain = [
        "The rain fell on the quiet street, and nobody walked along it.",
        "“Who goes there?” she asked; no one — nobody! — answered…",
        "I am a nobody (or am I?), said Ann's old friend.",
        "It's five o'clock: don't wait, it isn't here.",
    ]
    said = SpokenText(JobSpec("m", normalize="en"))
    for text in plain:
        assert said.of(text, None) == text == library(text)
    for text in (
        "5",
        "50%",
        "a & b @ c",
        "Dr. No",
        "e.g. this",
        "Henry VIII",
        "etc. and so on",
        "10 St. James St.",
    ):
        assert said.of(text, None) == library(text)


def test_a_lexicon_comes_before_the_numbers() -> None:
    spec = JobSpec("m", normalize="en", lexicon={"911": "nine one one"})
    assert SpokenText(spec).of("Call 911 or 912.", None) == "Call nine one one or nine hundred and twelve."


def test_the_phonemes_of_hibari_are_those_of_its_voice() -> None:
    from pipelines.hibari.text import PHONES, EnglishReader

    assert set(PHONEMES) == PHONES | set("ˈˌᵊ")
    assert set(PHONEMES) <= set(EnglishReader().voice.vocab)


def test_phonemes_replace_those_of_the_voice(tmp_path: Path) -> None:
    from pipelines.hibari.pipeline import HibariPipeline

    voice = HibariPipeline(threads=1)
    try:

        def said(text: str, **words: str) -> Speech:
            request = SynthesisRequest("one", _user(text), pronunciations=words)
            return submit(voice, replace(request, timestamps=True)).result()

        whole = said("Ask Nightjar today.")
        spoken = said("Ask Nightjar today.", Nightjar="bənˈænə")
        assert [word.text for word in spoken.words] == ["Ask", "Nightjar", "today."]
        assert "".join(one.text for one in spoken.phonemes if one.text not in "ˈˌ").find("bən") > 0
        assert not np.array_equal(spoken.samples, whole.samples)
        assert spoken.text == "Ask Nightjar today."
        # A link in a text is no pronunciation.
        assert "[Nightjar](" not in said("Ask Nightjar today.").text
    finally:
        voice.close()


def _user(text: str):
    from pipelines.request import Message

    return (Message("user", "text", text),)


@pytest.mark.parametrize(
    ("lexicon", "why"),
    [
        ({"Nightjar": "/nXt/"}, "has no phonemes 'X'"),
        ({"New York": "/nu/"}, "which is not one word"),
    ],
)
def test_phonemes_that_cannot_be_spoken_are_refused(lexicon: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(JobSpec("hibari", lexicon=lexicon))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    rig = Rig(tmp_path)
    yield rig
    rig.close()
    forget()


def test_a_model_without_phonemes_refuses_them(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="takes no phonemes"):
        rig.submit(["one"], lexicon={"one": "/wʌn/"})


def test_a_missing_library_is_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.spoken_text.installed_version", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        rig.submit(["one"], normalize="en")
    assert (caught.value.code, LIBRARY in str(caught.value)) == (ErrorCode.CONFIG_MISSING_LIBRARY, True)


def test_the_store_has_both_texts(rig: Rig) -> None:
    """The worker, the manifests and exports read the spoken text of the submit, also with another library."""
    asked: list[str] = []

    class Asked(FakePipeline):
        def submit(self, request: SynthesisRequest):
            asked.append(spoken_text(request))
            return super().submit(request)

    rig.pipeline = Asked()
    job = rig.submit(
        [" It costs $5. ", "Nothing."], normalize="en", lexicon={"costs": "is"}, quality=quality_of("basic")
    )
    assert str(job.spec.normalizer).startswith(f"{LIBRARY} ")
    lease = rig.claim_next()
    (first, second) = read_shard(rig.store, lease.input_key, lease.input_sha256)
    assert (first.written, second.written) == ("It costs $5.", None)
    rig.runner.run(lease)
    assert asked == ["It is five dollars.", "Nothing."]
    (shard,) = [data for key, (data, _) in rig.store.objects.items() if "/manifest/" in key]
    whole = rig.store.get(put_manifest(rig.ledger, rig.store, job.id).key)
    for manifest in (shard, whole):
        one, two = map(json.loads, manifest.splitlines())
        assert (one["text"], one["spoken_text"]) == ("It costs $5.", "It is five dollars.")
        assert (two["text"], "spoken_text" in two) == ("Nothing.", False)
    found = [facts(item) for item in audio_items(rig.ledger, rig.store, job.id)]
    assert [(one["text"], one["spoken_text"]) for one in found] == [
        ("It costs $5.", "It is five dollars."),
        ("Nothing.", "Nothing."),
    ]


def test_a_job_without_the_options_is_as_before(rig: Rig) -> None:
    job = rig.submit(["It costs $5."])
    rig.run_next()
    assert not {"normalize", "normalizer", "lexicon"} & msgspec.to_builtins(job.spec).keys()
    (item,) = audio_items(rig.ledger, rig.store, job.id)
    assert "spoken_text" not in facts(item)
    assert b"spoken" not in rig.store.get(put_manifest(rig.ledger, rig.store, job.id).key)
