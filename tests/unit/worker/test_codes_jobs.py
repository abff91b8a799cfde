"""Jobs that make codes: what the worker stores, checks, verifies and repairs, and their exports as the libraries
that train on them read them."""

from __future__ import annotations

import io
import json
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile

import nightjar
from jobs.checks import quality_of
from jobs.codes import StoredCodes, read_codes
from jobs.decode import CodedItem, decode, items_of_export, items_of_job
from jobs.export import Part, PartFiles, StoredJob, export_jobs
from jobs.export.audio import AudioNames, AudioReader
from jobs.export.code_formats import ESPNET_CODES
from jobs.export.dataset import open_destination
from jobs.export.items import audio_items
from jobs.job_options import job_of
from jobs.ledger.records import QUARANTINE, Artifact, ItemState, Job
from jobs.packs import read_artifact
from jobs.repair import repair_objects, reproduce
from jobs.store import open_store
from jobs.store.base import sha256_of
from jobs.verify import ObjectCheck
from jobs.where import parse_where
from pipelines.errors import ConfigError, ErrorCode, StoreError
from pipelines.registry import register_pipeline
from pipelines.request import CodecIdentity
from tests.support.export_kit import export
from tests.support.fake_worker import fake_card
from tests.support.fakes import CODEC, FRAME_SAMPLES, SAMPLE_RATE, FakeDecoder, FakePipeline, sine
from tests.support.worker_rig import Build, Rig

TEXTS = [f"Sentence number {number} of this job." for number in range(4)]


def made(rig: Rig, output: str, *, pack: bool = False, texts: list[str] = TEXTS, **spec: Any) -> Job:
    job = rig.submit(texts, output=output, pack=pack or msgspec.UNSET, **spec)
    while rig.status(job).items.pending:
        assert rig.run_next() == "finished"
    return job


def codes_of(rig: Rig, artifact: Artifact) -> StoredCodes:
    return read_codes(read_artifact(rig.store, artifact))


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("quality", ["off", "basic"])
def test_an_item_of_codes_alone_has_the_length_of_its_audio(build: Build, quality: str, pack: bool) -> None:
    rig = build()
    spec, _ = job_of({"output": "codes", "qa": quality})
    job = made(rig, "codes", pack=pack, quality=spec.quality)
    assert rig.pipelines.pipelines()
    assert rig.decodes == [False]
    for item, text in zip(rig.items(job), TEXTS, strict=True):
        assert item.artifact is not None
        artifact, speech = item.artifact, sine(text, item.artifact.seed)
        assert (artifact.kind, artifact.samples, artifact.sample_rate) == ("codes", len(speech), SAMPLE_RATE)
        assert artifact.duration_ms == round(len(speech) / 16)
        assert "/codes/" in artifact.key
        assert artifact.key.endswith(".safetensors")
        stored = codes_of(rig, artifact)
        assert (stored.codec, len(stored.codes) * FRAME_SAMPLES) == (CODEC, len(speech))
        assert stored.codes[:, 1].tolist() == [*range(len(speech) // FRAME_SAMPLES)]
        assert stored.voice_codes is not None
    assert rig.audio() == {}
    status = rig.status(job)
    assert status.audio_ms == sum(item.artifact.duration_ms for item in rig.items(job) if item.artifact)
    # Filters measure the length of codes too.
    longer = parse_where("seconds > 0.1")
    assert len([*rig.ledger.items(job.id, where=longer)]) == len(TEXTS)
    assert [out.items for out in rig.ledger.filtered_out(job.id, parse_where("seconds > 100"))] == [4]
    draws = rig.ledger.draws_of(job.id, [0])
    assert [sorted(row.draw.scores) for row in draws] == (
        [["ended", "repetition"]] if quality == "basic" else []
    )


def test_codes_beside_audio_are_counted_once(build: Build) -> None:
    rig = build()
    job = made(rig, "both", quality=quality_of("basic"))
    assert rig.decodes == [True]
    beside = {one.index: one for one in rig.ledger.artifacts(job.id, "codes")}
    for item in rig.items(job):
        assert item.artifact is not None
        assert item.artifact.kind == "audio"
        samples, _ = soundfile.read(io.BytesIO(rig.store.objects[item.artifact.key][0]))
        assert len(codes_of(rig, beside[item.index]).codes) * FRAME_SAMPLES == len(samples)
    status = rig.status(job)
    assert status.audio_ms == sum(item.artifact.duration_ms for item in rig.items(job) if item.artifact)


def test_a_job_of_audio_opens_the_decoder_that_codes_did_without(build: Build) -> None:
    rig = build()
    made(rig, "codes", quality=None)
    rig.submit(["Aloud."])
    assert rig.run_next() == "finished"
    made(rig, "codes", quality=None, seed=3)
    assert rig.decodes == [False, True]


@pytest.mark.parametrize("output", ["codes", "both"])
def test_lost_codes_are_found_and_made_again(build: Build, output: str) -> None:
    rig = build()
    job = made(rig, output, quality=None)
    before = dict(rig.store.objects)
    kept = next(one for one in rig.ledger.artifacts(job.id, "codes") if one.index == 2)
    rig.store.delete(kept.key)
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, job)]
    assert [one.key for one in lost] == [kept.key]
    counts = repair_objects(rig.ledger, rig.store, job, rig.pipeline, lost)
    assert counts == {"same": 1}
    assert rig.store.objects[kept.key][0] == before[kept.key][0]
    again = reproduce(rig.ledger, rig.store, job, rig.pipeline, 4)
    assert {one.match for one in again} == {"same"}


def test_rejected_codes_are_quarantined_and_drawn_again_at_a_retry(build: Build) -> None:
    rig = build()
    spec, _ = job_of({"output": "codes", "qa_set": ["draws=1", "bounds.ended.low=2"]})
    rig.submit(["Too much."], output="codes", quality=spec.quality)
    rig.run_next()
    (job,) = rig.ledger.jobs()
    (item,) = rig.items(job)
    assert (item.state, item.error_code) == (ItemState.FAILED, ErrorCode.SYNTH_NO_EOS)
    (kept,) = rig.ledger.artifacts(job.id, QUARANTINE)
    assert kept.key.endswith(".safetensors")
    assert codes_of(rig, kept).codec == CODEC
    rig.store.delete(kept.key)
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, job)]
    assert repair_objects(rig.ledger, rig.store, job, rig.pipeline, lost) == {"same": 1}
    assert codes_of(rig, kept).codec == CODEC


def test_checks_that_need_samples_are_refused_by_name() -> None:
    for options, named in (
        ({"qa": "strict"}, "asr, distillmos, silence, pause, loudness, wer, cer, silero"),
        ({"qa_set": ["bounds.pause.high=2"]}, "pause"),
        ({"qa_set": ["trim=true"]}, "trim"),
    ):
        with pytest.raises(ConfigError, match="need audio") as refused:
            job_of({"output": "codes", **options})
        for name in named.split(", "):
            assert name in refused.value.message
    spec, _ = job_of({"output": "codes", "qa_set": ["bounds.duration.high=3"]})
    assert spec.quality is not None
    assert set(spec.quality.bounds) == {"ended", "duration"}


def test_a_model_without_a_codec_is_refused_at_submit(build: Build) -> None:
    with pytest.raises(ConfigError, match="hibari has no codec"):
        build().submit(["Hello."], model="hibari", output="codes")


@pytest.fixture(params=["codes", "both"])
def finished(request: pytest.FixtureRequest, build: Build) -> tuple[Rig, Job]:
    rig = build()
    return rig, made(rig, request.param, pack=True, quality=None)


def exported(finished: tuple[Rig, Job], format: str, **options: Any) -> Path:
    rig, job = finished
    to = rig.folder / "exports" / format
    to.parent.mkdir(exist_ok=True)
    export(rig.ledger, rig.store, job.id, format, str(to), **options)
    return to


def check_about(about: dict[str, Any], index: int) -> None:
    assert about["example_id"] == f"item-{index}"
    assert msgspec.convert(about["codec"], CodecIdentity) == CODEC
    assert about["voice_codes"] == [[7, 7]]


def check_codes(codes: Any, index: int) -> None:
    codes = np.array(codes)
    assert codes.shape == (len(sine(TEXTS[index], 0)) // FRAME_SAMPLES, 2)
    assert codes[:, 1].tolist() == [*range(len(codes))]


def test_webdataset_reads_codes(finished: tuple[Rig, Job]) -> None:
    webdataset = pytest.importorskip("webdataset")
    (tar,) = (exported(finished, "webdataset") / "train").iterdir()
    samples = list(webdataset.WebDataset(str(tar), shardshuffle=False).decode())
    assert len(samples) == len(TEXTS)
    for index, sample in enumerate(samples):
        check_codes(sample["codes.npy"], index)
        assert sample["codes.npy"].dtype == np.int16
        check_about(sample["json"], index)
        assert sample["txt"] == TEXTS[index]
        assert ("wav" in sample) == (finished[1].spec.output == "both")


def test_pyarrow_and_datasets_read_codes(finished: tuple[Rig, Job], monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (file,) = (exported(finished, "parquet") / "data").iterdir()
    table = parquet.read_table(file)
    assert str(table.schema.field("codes").type) == "list<element: list<element: int16>>"
    assert ("audio" in table.column_names) == (finished[1].spec.output == "both")
    for index, row in enumerate(table.to_pylist()):
        check_codes(row["codes"], index)
        check_about(row, index)


@pytest.mark.parametrize("format", ["lhotse", "shar"])
def test_lhotse_reads_codes(finished: tuple[Rig, Job], format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lhotse = pytest.importorskip("lhotse")
    rig, job = finished
    root = {"audio_root": rig.folder / "audio"} if (format, job.spec.output) == ("lhotse", "both") else {}
    to = exported(finished, format, **root) / "train"
    monkeypatch.chdir(to)
    read = (
        lhotse.CutSet.from_file("cuts.jsonl.gz") if format == "lhotse" else lhotse.CutSet.from_shar(in_dir=to)
    )
    cuts = list(read)
    assert len(cuts) == len(TEXTS)
    for index, cut in enumerate(cuts):
        check_codes(cut.load_codes(), index)
        assert cut.duration == len(sine(TEXTS[index], 0)) / SAMPLE_RATE
        (spoken,) = cut.supervisions
        assert spoken.text == TEXTS[index]
        check_about(spoken.custom, index)
        assert cut.has_recording == (job.spec.output == "both")
        if cut.has_recording:
            assert cut.load_audio().shape == (1, len(sine(TEXTS[index], 0)))


def test_the_manifest_names_the_codes(finished: tuple[Rig, Job]) -> None:
    rig, job = finished
    lines = [json.loads(line) for line in exported(finished, "manifest").read_text().splitlines()]
    assert [line["key"] for line in lines] == [item.artifact.key for item in rig.items(job) if item.artifact]


def test_formats_of_audio_refuse_codes_alone_and_formats_of_codes_refuse_audio(build: Build) -> None:
    rig = build()
    audio, codes = made(rig, "both", quality=None), made(rig, "codes", quality=None)
    for name in ("espnet", "nemo", "kaldi", "ljspeech", "audiofolder", "espnet-dataset", "openai-batch"):
        with pytest.raises(ConfigError, match="codes alone") as refused:
            export(rig.ledger, rig.store, codes.id, name, str(rig.folder / "x"))
        assert "nightjar decode" in refused.value.advice
    with pytest.raises(ConfigError, match="no audio format"):
        export(rig.ledger, rig.store, codes.id, "parquet", str(rig.folder / "x"), sample_rate=8000)
    # Lost codes are no part of an export of audio.
    (one, *_) = rig.ledger.artifacts(audio.id, "codes")
    rig.store.delete(one.key)
    export(rig.ledger, rig.store, audio.id, "nemo", str(rig.folder / "nemo.jsonl"))
    with pytest.raises(StoreError, match="missing"):
        export(rig.ledger, rig.store, audio.id, "parquet", str(rig.folder / "y"))


def stored_audio(rig: Rig) -> dict[str, bytes]:
    return {"/".join(Path(key).parts[2:]): data for key, data in rig.audio().items()}


def decoded_files(to: Path) -> dict[str, bytes]:
    return {str(path.relative_to(to)): path.read_bytes() for path in to.rglob("audio/**/*.*")}


@pytest.mark.parametrize("pack", [False, True])
def test_audio_decoded_later_is_that_of_the_job_that_decoded_at_once(build: Build, pack: bool) -> None:
    rig = build()
    made(rig, "both", quality=None, format="flac", sample_rate=24_000)
    job = made(rig, "codes", quality=None, format="flac", sample_rate=24_000, pack=pack)
    to, items = rig.folder / "decoded", [*items_of_job(rig.ledger, rig.store, job)]
    # Stopped after two items; the next one continues.
    with pytest.raises(KeyboardInterrupt):
        decode(items, FakeDecoder(died_after=2), "fake", to, job.spec, job.id)
    assert not (to / "manifest.jsonl").exists()
    decode(items[:3], FakeDecoder(), "fake", to, job.spec, job.id)
    changed = next(to.rglob("*.flac"))
    kept = changed.read_bytes()
    changed.write_bytes(b"")
    with pytest.raises(ConfigError, match="was changed"):
        decode(items, FakeDecoder(), "fake", to, job.spec, job.id)
    changed.write_bytes(kept)
    again = FakeDecoder()
    assert decode(items, again, "fake", to, job.spec, job.id) == (4, 3)
    assert again.decoded == 1
    assert decoded_files(to) == stored_audio(rig)
    lines = [json.loads(line) for line in (to / "manifest.jsonl").read_text().splitlines()]
    for index, line in enumerate(lines):
        data = (to / line["audio_filepath"]).read_bytes()
        info = soundfile.info(io.BytesIO(data))
        assert (line["example_id"], line["samples"]) == (f"item-{index}", info.frames)
        assert (line["sample_rate"], line["sha256"]) == (24_000, sha256_of(data))


@pytest.mark.parametrize("format", ["webdataset", "parquet"])
def test_an_export_decodes_to_the_audio_of_its_job(finished: tuple[Rig, Job], format: str) -> None:
    rig, job = finished
    to = rig.folder / "decoded"
    items = items_of_export(exported(finished, format))
    assert decode(items, FakeDecoder(), "fake", to, job.spec, "export") == (4, 0)
    direct = rig.folder / "direct"
    decode(items_of_job(rig.ledger, rig.store, job), FakeDecoder(), "fake", direct, job.spec, job.id)
    assert decoded_files(to) == decoded_files(direct)
    # Files of another source may have the same names.
    with pytest.raises(ConfigError, match="another job or export"):
        decode(items_of_job(rig.ledger, rig.store, job), FakeDecoder(), "fake", to, job.spec, job.id)


@pytest.mark.parametrize("output", ["codes", "both"])
def test_python_decodes_jobs_and_exports(build: Build, output: str) -> None:
    rig = build()
    # Jobs in Python open their store by its address.
    rig.store = open_store(str(rig.folder))  # type: ignore[assignment]
    job = made(rig, output, pack=True, quality=None)
    of_job, of_export = rig.folder / "of job", rig.folder / "of export"
    forget = register_pipeline("with codec", fake_card(), FakePipeline, decoder=lambda **_: FakeDecoder())
    try:
        with closing(nightjar.Job(job.id, rig.settings)) as handle:
            assert nightjar.decode(handle, of_job, model="with codec") == of_job
        folder = str(exported((rig, job), "parquet"))
        assert nightjar.decode(folder, of_export, model="with codec") == of_export
    finally:
        forget()
    assert len(decoded_files(of_job)) == len(TEXTS)
    assert decoded_files(of_job) == decoded_files(of_export)
    with pytest.raises(ConfigError, match="The argument `source` is 5"):
        nightjar.decode(5, of_job)  # type: ignore[arg-type]


def test_codes_of_another_codec_and_other_folders_are_refused(finished: tuple[Rig, Job]) -> None:
    rig, job = finished
    other = msgspec.structs.replace(CODEC, sha256="1" * 64)
    items = [
        CodedItem(item.name, item.about, StoredCodes(item.codes.codes, None, other))
        for item in items_of_job(rig.ledger, rig.store, job)
    ]
    with pytest.raises(ConfigError, match="another codec"):
        decode(items, FakeDecoder(), "fake", rig.folder / "x", job.spec, job.id)
    with pytest.raises(ConfigError, match="is no finished export"):
        next(items_of_export(rig.folder))
    with pytest.raises(ConfigError, match="cannot be decoded"):
        next(items_of_export(exported(finished, "shar")))
    export = exported(finished, "webdataset")
    (shard,) = export.glob("*/*.tar")
    whole = shard.read_bytes()
    # The reader of tar files does not notice a missing end.
    ends = whole.index(b"item-1")
    for damaged, said in (
        (whole[:ends], "was changed"),
        (whole.replace(b'"index":1', b'"index":['), "is damaged"),
    ):
        shard.write_bytes(damaged)
        with pytest.raises(ConfigError, match=said):
            list(items_of_export(export))
    shard.rename(rig.folder / "outside.tar")
    with pytest.raises(ConfigError, match=r"no finished export: .*shard-000000.tar"):
        list(items_of_export(export))
    end = export / "export.json"
    end.write_bytes(end.read_bytes().replace(b"train/shard-000000.tar", b"../outside.tar"))
    with pytest.raises(ConfigError, match="is no finished export"):
        list(items_of_export(export))
    rig.submit(["Aloud."], seed=9)
    with pytest.raises(ConfigError, match="has no codes"):
        next(items_of_job(rig.ledger, rig.store, next(iter(rig.ledger.jobs()))))


def test_json_lines_have_the_codes(finished: tuple[Rig, Job]) -> None:
    rig, job = finished
    root = {"audio_root": rig.folder / "audio"} if job.spec.output == "both" else {}
    lines = [json.loads(line) for line in exported(finished, "jsonl", **root).read_text().splitlines()]
    for index, line in enumerate(lines):
        check_codes(line["codes"], index)
        check_about(line, index)
        assert Path(line.get("audio_filepath", __file__)).is_file()
        assert ("audio_filepath" in line) == (job.spec.output == "both")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of words."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(sorted({*" ".join(TEXTS).split(), "."}))}
    made_of = tokenizers.Tokenizer(tokenizers.models.WordLevel({**words, "?": 99, "job": 98}, unk_token="?"))
    made_of.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    made_of.save(str(tmp_path / "words" / "tokenizer.json"))
    return tmp_path / "words"


@pytest.mark.parametrize(("ratio", "sizes"), [("2:5", (2, 5)), ("1:100", (1, 100)), (None, (13, 26))])
def test_text_and_codes_take_turns(
    build: Build, tokenizer: Path, ratio: str | None, sizes: tuple[int, int]
) -> None:
    rig = build()
    job = made(rig, "codes", quality=None)
    options = {"interleave": ratio, "tokenizer": str(tokenizer)}
    to = exported((rig, job), "interleaved", **options)
    for index, text in enumerate(to.read_text().splitlines()):
        line = json.loads(text)
        assert (line["tokenizer"]["name"], len(line["tokenizer"]["sha256"])) == ("words", 64)
        kinds, spans = zip(*line["spans"], strict=True)
        assert kinds == ("text", "codes") * (len(spans) // 2)
        assert len([token for ids in spans[::2] for token in ids]) == 7
        check_codes([frame for frames in spans[1::2] for frame in frames], index)
        for ids, frames in zip(spans[:-2:2], spans[1:-2:2], strict=True):
            assert (len(ids), len(frames)) == sizes
        # Of the last spans one has at most the size, and the other has the rest.
        assert len(spans[-2]) <= sizes[0] or len(spans[-1]) <= sizes[1]


def test_words_and_their_codes_take_turns(build: Build, tokenizer: Path) -> None:
    rig = build()
    job = made(rig, "both", quality=None, timestamps=True)
    to = exported((rig, job), "interleaved", interleave="words", tokenizer=str(tokenizer))
    (first, *_) = to.read_text().splitlines()
    line = json.loads(first)
    words = [text for text, _, _ in line["words"]]
    assert [len(ids) for kind, ids in line["spans"] if kind == "text"] == [1] * (len(words) - 1) + [2]
    ends = np.cumsum([len(frames) for kind, frames in line["spans"] if kind == "codes"])
    assert ends[:-1].tolist() == [round(start * CODEC.frame_rate) for _, start, _ in line["words"][1:]]
    check_codes([frame for kind, frames in line["spans"] if kind == "codes" for frame in frames], 0)


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        ("interleaved", {"interleave": "0:3"}, "no ratio"),
        ("interleaved", {"tokenizer": "/nowhere/at/all"}, "no tokenizer"),
        ("interleaved", {"interleave": "words", "tokenizer": "/nowhere/at/all"}, "no tokenizer"),
        ("jsonl", {"interleave": "13:26"}, "not interleaved"),
    ],
)
def test_options_of_spans_that_cannot_be_used_are_refused(
    build: Build, format: str, options: dict[str, str], message: str
) -> None:
    rig = build()
    job = made(rig, "codes", quality=None, texts=TEXTS[:1])
    with pytest.raises(ConfigError, match=message):
        exported((rig, job), format, **options)
    audio = rig.submit(TEXTS)
    with pytest.raises(ConfigError, match="needs codes"):
        export(rig.ledger, rig.store, audio.id, "jsonl", str(rig.folder / "x"))


def test_one_list_of_tokens_is_of_one_codec(finished: tuple[Rig, Job]) -> None:
    rig, job = finished
    items = audio_items(rig.ledger, rig.store, job.id)
    first, second = (item for item, _ in islice(AudioReader(rig.store, codes=True).located(items), 2))
    assert second.codes is not None
    other = second.codes._replace(codec=msgspec.structs.replace(CODEC, codebook_sizes=(10, 10)))
    mixed = [(first, ""), (msgspec.structs.replace(second, codes=other), "")]
    part = Part("train", 0, 0, 1, 2, 0, 1)
    with (
        open_destination(str(rig.folder / "x"), None) as destination,
        PartFiles(destination, AudioNames((), None), "_export/x", lambda _: None) as files,
        pytest.raises(ConfigError, match="codes of several codecs"),
    ):
        ESPNET_CODES.write(part, files, job, iter(mixed))


def test_jobs_of_codes_alone_have_no_audio_that_could_differ(build: Build) -> None:
    rig = build()
    jobs = [made(rig, "codes", quality=None, format=one) for one in ("wav", "flac")]
    stored = [StoredJob(rig.ledger, rig.store, job) for job in jobs]
    to = rig.folder / "all"
    assert export_jobs(stored, "webdataset", str(to)).items == 2 * len(TEXTS)


def test_espnet_reads_shifted_codes_from_an_archive(
    finished: tuple[Rig, Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    to = exported(finished, "espnet-codes") / "train"
    monkeypatch.chdir(to)
    about = json.loads((to / "data.json").read_bytes())
    assert (about["task"], about["num_examples"], len(about["examples"])) == ("tts", len(TEXTS), len(TEXTS))
    files = dict(reversed(entry.split(",")[:2]) for entry in about["data_files"])
    tables = {
        kind: dict(line.split(" ", 1) for line in Path(file).read_text().splitlines())
        for kind, file in files.items()
    }
    names = json.loads(Path(about["vocabularies"][0]).read_text())
    assert len(names) == sum(CODEC.codebook_sizes)
    for index, name in enumerate(about["examples"]):
        assert tables["g2p"][name] == TEXTS[index]
        file, offset = tables["codec"][name].rsplit(":", 1)
        # Kaldi's binary vector of int32: its length, and the values, each after the size of its type.
        data = Path(file).read_bytes()[int(offset) :]
        assert data[:3] == b"\0B\4"
        count = int.from_bytes(data[3:7], "little")
        values = np.frombuffer(data[7 : 7 + 5 * count], [("size", "i1"), ("value", "<i4")])
        assert set(values["size"]) == {4}
        rows = values["value"].reshape(-1, 2)
        assert names[rows[3, 1]] == "<codec_layer1_code3>"
        check_codes(rows - [0, CODEC.codebook_sizes[0]], index)
