"""Jobs with the times of words: what is stored, made again, and exported, read back by each format's readers."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import datasets
import lhotse
import msgspec
import numpy as np
import pytest

import nightjar.job
from jobs.checks import Quality
from jobs.export.items import AudioItem
from jobs.export.line_formats import ctm_lines, cues, srt, textgrid, vtt
from jobs.export.manifest import put_manifest
from jobs.ledger.records import Artifact, Job
from jobs.repair import repair_objects
from jobs.store import open_store
from jobs.verify import ObjectCheck
from pipelines.errors import ConfigError, ErrorCode
from pipelines.registry import register_pipeline
from pipelines.request import Capabilities, Speech, SynthesisRequest, Word
from tests.support.export_kit import export
from tests.support.fake_worker import fake_card
from tests.support.fakes import SAMPLE_RATE, FakePipeline, even_words, sine
from tests.support.worker_rig import Build, Rig
from worker.quality.meters import Reading, Readings, Utterance
from worker.quality.process import MeterPool
from worker.result_writer import ResultWriter

TEXTS = ["Good evening, Tom.", 'Say "good night" & <go>!']


class Timed(FakePipeline):
    """Speech with a second of silence at both ends, the times of its words, and those of its vowels."""

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        text = str(request.messages[-1].content)
        samples = np.pad(sine(text, 7), SAMPLE_RATE)
        words = tuple(word.moved(1.0) for word in even_words(text, len(sine(text, 7)) / SAMPLE_RATE))
        vowels = tuple(Word("o", word.start_s, word.end_s) for word in words if "o" in word.text)
        future: Future[Speech] = Future()
        said = {"words": words, "phonemes": vowels} if request.timestamps else {}
        future.set_result(Speech(samples, SAMPLE_RATE, text, **said))
        return future


def timed_job(build: Build, **spec: Any) -> tuple[Rig, Job]:
    rig = build(pipeline=Timed())
    job = rig.submit(TEXTS, timestamps=True, **spec)
    rig.run_next()
    return rig, job


def expected(text: str, begin: float) -> list[Word]:
    return [word.moved(begin) for word in even_words(text, len(sine(text, 7)) / SAMPLE_RATE)]


def near(found: Any, wanted: list[Word]) -> None:
    assert [one[0] for one in found] == [word.text for word in wanted]
    for one, word in zip(found, wanted, strict=True):
        assert one[1:] == pytest.approx([word.start_s, word.end_s], abs=6e-4)


def manifest(rig: Rig, job: Job) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in rig.store.get(put_manifest(rig.ledger, rig.store, job.id).key).splitlines()
    ]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("settings", [{}, {"sample_rate": 8000, "format": "flac"}])
def test_a_manifest_has_the_words_of_every_item(build: Build, pack: bool, settings: dict[str, Any]) -> None:
    rig, job = timed_job(build, **settings, **({"pack": True} if pack else {}))
    for line, text in zip(manifest(rig, job), TEXTS, strict=True):
        near(line["words"], expected(text, 1.0))


def test_trimmed_silence_moves_the_words_and_lost_ones_are_made_again(build: Build) -> None:
    rig, job = timed_job(build, quality=Quality(trim=True, trim_keep_ms=100))
    before = manifest(rig, job)
    for line, text in zip(before, TEXTS, strict=True):
        first = line["words"][0][1]
        assert 0.05 <= first <= 0.15
        near(line["words"], expected(text, first))
        assert line["words"][-1][2] <= line["duration"]
    lost = [key for key in rig.store.objects if "/words/" in key]
    assert len(lost) == 2
    rig.store.delete(lost[0])
    faults = [fault for fault, _ in ObjectCheck(rig.ledger, rig.store, job)]
    assert [(fault.kind, fault.key) for fault in faults] == [("words", lost[0])]
    assert repair_objects(rig.ledger, rig.store, job, rig.pipeline, faults) == {"same": 1}
    assert manifest(rig, job) == before


def test_items_in_python_have_their_words(build: Build) -> None:
    rig = build(pipeline=Timed())
    rig.store = open_store(str(rig.folder))  # type: ignore[assignment]
    job = rig.submit(TEXTS, timestamps=True)
    rig.run_next()
    with closing(nightjar.job.Job(job.id, rig.settings)) as found:
        assert [list(item.words) for item in found] == [expected(text, 1.0) for text in TEXTS]


class Host:
    """Meters that give each word the same share of the time."""

    def measure(self, meters: Mapping[str, object], utterances: Sequence[Utterance]) -> Sequence[Readings]:
        assert [*meters] == ["align"]
        words = (even_words(one.text, len(one.samples) / one.sample_rate) for one in utterances)
        return [{"align": Reading(-0.5, "aligned", words=one)} for one in words]

    def stop(self) -> None:
        return

    def close(self) -> None:
        return


@pytest.mark.parametrize("timestamps", [True, False])
def test_a_model_without_times_has_those_of_the_aligner(build: Build, timestamps: bool) -> None:
    rig = build()
    forget = register_pipeline(
        "untimed", replace(fake_card("untimed"), capabilities=Capabilities()), FakePipeline
    )
    quality = Quality(trim=True, trim_keep_ms=0, meters={"align": {"model": "folder"}})
    own = {"timestamps": True} if timestamps else {}
    rig.pipeline.capabilities = Capabilities()
    rig.pipeline.submit = lambda request: Timed.submit(rig.pipeline, replace(request, timestamps=False))  # type: ignore[method-assign, arg-type]
    rig.writer = ResultWriter(meters=MeterPool(open_host=Host))  # type: ignore[arg-type, return-value]
    rig.runner = rig.runner_on(rig.ledger)
    try:
        job = rig.submit(TEXTS, model="untimed", quality=quality, **own)
        assert rig.run_next() == "finished"
        if timestamps:
            with pytest.raises(ConfigError) as caught:
                rig.submit(TEXTS, model="untimed", quality=Quality(), timestamps=True)
            assert "--qa-set meters.align.model=FOLDER" in caught.value.advice
    finally:
        forget()
    for line, text in zip(manifest(rig, job), TEXTS, strict=True):
        if timestamps:
            near(line["words"], list(even_words(text, line["duration"])))
        assert ("words" in line) is timestamps
    (draw,) = [row.draw for row in rig.ledger.draws(job.id)][:1]
    assert draw.scores["align"].value == -0.5


def test_a_job_without_times_has_no_words(build: Build) -> None:
    rig = build(pipeline=Timed())
    job = rig.submit(TEXTS)
    rig.run_next()
    assert not [key for key in rig.store.objects if "/words/" in key]
    assert not any("words" in line for line in manifest(rig, job))
    with pytest.raises(ConfigError) as caught:
        export(rig.ledger, rig.store, job.id, "srt", str(rig.folder / "srt"))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert caught.value.advice == "Run the job with --timestamps."


def textgrid_tiers(text: str) -> dict[str, list[tuple[str, float, float]]]:
    """Reads a TextGrid by the rules of Praat's manual: the tiers, whose intervals cover the file."""
    lines = [line.strip() for line in text.splitlines()]
    assert lines[:3] == ['File type = "ooTextFile"', 'Object class = "TextGrid"', ""]
    end = float(lines[4].removeprefix("xmax = "))
    tiers: dict[str, list[tuple[str, float, float]]] = {}
    interval = re.compile(
        r"intervals \[(\d+)\]:\n\s*xmin = (\S+)\n\s*xmax = (\S+)\n\s*text = \"((?:[^\"]|\"\")*)\"\n"
    )
    for tier in text.split('class = "IntervalTier"')[1:]:
        name, count = re.findall(r'name = "(\w+)"|intervals: size = (\d+)', tier)[:2]
        found = interval.findall(tier)
        assert [int(one[0]) for one in found] == list(range(1, int(count[1]) + 1))
        edges = [(float(one[1]), float(one[2])) for one in found]
        assert edges[0][0] == 0
        assert edges[-1][1] == end
        assert all(one[1] == two[0] for one, two in pairwise(edges))
        assert all(start < stop for start, stop in edges)
        tiers[name[0]] = [
            (one[3].replace('""', '"'), *edge) for one, edge in zip(found, edges, strict=True) if one[3]
        ]
    assert f"size = {len(tiers)}" in lines
    return tiers


def subtitles(text: str, point: str) -> list[tuple[float, float, str]]:
    """Reads subtitles: blocks of two lines or more, with times in order."""
    clock = rf"(\d\d):(\d\d):(\d\d){re.escape(point)}(\d\d\d)"
    found = []
    for block in text.strip().split("\n\n"):
        times, *lines = block.split("\n")[1 if point == "," else 0 :]
        match = re.fullmatch(rf"{clock} --> {clock}", times)
        assert match, times
        hours, minutes, seconds, thousandths, *end = map(int, match.groups())
        assert all(len(line) <= 42 for line in lines)
        found.append(
            (
                hours * 3600 + minutes * 60 + seconds + thousandths / 1000,
                end[0] * 3600 + end[1] * 60 + end[2] + end[3] / 1000,
                " ".join(lines),
            )
        )
    return found


def test_every_export_has_the_words(build: Build) -> None:
    rig, job = timed_job(build)
    to = rig.folder / "to"

    def exported(format: str, name: str = "") -> Path:
        export(
            rig.ledger, rig.store, job.id, format, str(to / format), audio_root=None if name else rig.folder
        )
        return to / format / name

    texts = [expected(text, 1.0) for text in TEXTS]
    for cut, words in zip(
        lhotse.CutSet.from_file(exported("lhotse") / "train/cuts.jsonl.gz"), texts, strict=True
    ):
        alignment: Any = cut.supervisions[0].alignment
        near([(one.symbol, one.start, one.end) for one in alignment["word"]], words)
        assert [one.symbol for one in alignment["phone"]] == ["o" for word in words if "o" in word.text]
        assert "words" not in cut.supervisions[0].custom
    lhotse.qa.validate(lhotse.SupervisionSet.from_file(to / "lhotse/train/supervisions.jsonl.gz"))

    parquet = datasets.load_dataset("parquet", data_files=str(next(exported("parquet", "data").glob("*"))))[
        "train"
    ]
    for row, words in zip(parquet.remove_columns("audio"), texts, strict=True):
        near([(one["text"], one["start_s"], one["end_s"]) for one in row["words"]], words)

    with tarfile.open(next(exported("webdataset", "train").glob("*.tar"))) as archive:
        found = [json.load(archive.extractfile(one)) for one in archive if one.name.endswith(".json")]  # type: ignore[arg-type]
    nemo = [json.loads(line) for line in exported("nemo").read_text().splitlines()]
    for lines in (found, nemo):
        for line, words in zip(lines, texts, strict=True):
            near(line["words"], words)

    names = [Path(line["key"]).stem for line in manifest(rig, job)]
    rows = [line.split(" ") for line in exported("ctm").read_text().splitlines()]
    assert [row[:2] for row in rows] == [
        [name, "1"] for name, words in zip(names, texts, strict=True) for _ in words
    ]
    near(
        [(row[4], float(row[2]), float(row[2]) + float(row[3])) for row in rows],
        [word for words in texts for word in words],
    )

    for name, words in zip(names, texts, strict=True):
        tiers = textgrid_tiers((exported("textgrid", "train") / f"{name}.TextGrid").read_text())
        near(tiers["words"], words)
        assert [one[0] for one in tiers["phones"]] == ["o" for word in words if "o" in word.text]
        (srt,) = subtitles((exported("srt", "train") / f"{name}.srt").read_text(), ",")
        assert srt == (
            words[0].start_s,
            pytest.approx(words[-1].end_s, abs=1e-3),
            " ".join(w.text for w in words),
        )
        vtt = (exported("vtt", "train") / f"{name}.vtt").read_text()
        assert vtt.startswith("WEBVTT\n\n")
        (cue,) = subtitles(vtt.removeprefix("WEBVTT\n\n"), ".")
        escaped = srt[2].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        assert cue == (*srt[:2], escaped)


def test_control_characters_of_words_leave_files_readable() -> None:
    texts = ["\0", "Good\x07", "two\nwords", "\u2028", 'a"b', "\x1b[2Jend.\r", "-->"]
    words = tuple(Word(text, number / 10, number / 10 + 0.1) for number, text in enumerate(texts))
    audio = Artifact(0, "audio", "a/000000000-utt.wav", "", 1, 1000, 24_000, 24_000, 0)
    item = AudioItem("utt", "utt", audio, msgspec.Raw(b"{}"), cast("Job", None), words=words)
    said = ["Good", "two words", 'a"b', "[2Jend.", "-->"]
    rows = [line.split(" ") for line in ctm_lines(item.job, item, "").decode().splitlines()]
    assert [row[0] for row in rows] == ["000000000-utt"] * 5
    assert [row[4:] for row in rows] == [[text.replace(" ", "_")] for text in said]
    assert [one[0] for one in textgrid_tiers(textgrid(item))["words"]] == said
    assert [one[2] for one in subtitles(srt(item), ",")] == [" ".join(said[:4]), "-->"]
    shown = subtitles(vtt(item).removeprefix("WEBVTT\n\n"), ".")
    assert [one[2] for one in shown] == [" ".join(said[:4]), "--&gt;"]
    alone = msgspec.structs.replace(item, words=words[:1])
    assert (ctm_lines(item.job, alone, ""), srt(alone), vtt(alone)) == (b"", "", "WEBVTT\n")
    assert textgrid_tiers(textgrid(alone)) == {"words": []}


def test_subtitles_end_at_sentences_pauses_and_limits() -> None:
    def said(*words: tuple[str, float, float]) -> list[str]:
        return [cue.text for cue in cues(tuple(Word(*word) for word in words))]

    assert said(("One.", 0, 1), ("Two", 1, 2)) == ["One.", "Two"]
    assert said(("One", 0, 1), ("two", 1.9, 2)) == ["One", "two"]
    assert said(("One", 0, 1), ("two", 1.7, 2)) == ["One two"]
    assert said(("One", 0, 4), ("two", 4, 7), ("three", 7, 7.1)) == ["One two", "three"]
    assert said(
        ("\u597d\u3002", 0, 1), ("\u6211", 1, 2), ("\u7528", 2, 3), ("Ada,", 3, 4), ("\u5bf9", 4, 5)
    ) == [
        "\u597d\u3002",
        "\u6211\u7528Ada,\u5bf9",
    ]
    assert said(("a" * 40, 0, 1), ("b" * 39, 1, 2), ("c", 2, 3)) == ["a" * 40 + " " + "b" * 39, "c"]
