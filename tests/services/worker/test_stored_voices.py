"""Stored voices by name in jobs: frozen at submit, whatever becomes of them later, in every format and
place that names a voice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.checks import Quality
from jobs.export.items import audio_items, item_metadata
from jobs.ingest import SubmitOptions, dry_run, submit
from jobs.layout import references_prefix
from jobs.ledger import Ledger
from jobs.ledger.records import FrozenVoice, Job, JobSpec, JobState, Reading
from jobs.repair import repair_objects, reproduce
from jobs.shard_file import ShardSize
from jobs.verify import Expected
from jobs.voices import voice_folder
from pipelines.duration import Pace
from pipelines.errors import ErrorCode, InputError, ServiceError
from pipelines.recording import read_recording
from pipelines.registry import register_pipeline
from pipelines.request import Capabilities, Generation, Message, Speech, SynthesisRequest
from pipelines.stored_voices import VoiceFolder
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline, spoken_text
from tests.support.serving_kit import wav
from tests.support.worker_rig import Rig
from worker.garbage import orphans

ANNA, BEN, OTHER = wav(1.0), wav(1.1), wav(1.2)
ABLE = Capabilities(voices=("Heart",), cloning=True)


class Cloner(FakePipeline):
    """A fake that clones and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = ABLE
        self.asked: dict[str, SynthesisRequest] = {}

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        self.asked[spoken_text(request)] = request
        return super().submit(request)

    def voice_of(self, text: str) -> tuple[str | None, list[Any], str | None]:
        """The named voice, the recordings and their text that a text was asked for with."""
        request = self.asked[text]
        return (
            request.generation.voice,
            [m.content for m in request.messages if m.modality == "audio"],
            request.generation.reference_text,
        )


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    forget = register_pipeline(
        "fake", replace(fake_card(), capabilities=ABLE, check_reference=read_recording), Cloner
    )
    rig = Rig(tmp_path, Cloner())
    folder(rig).add("anna", ANNA, "Anna speaks.")
    folder(rig).add("ben", BEN, "")
    yield rig
    rig.close()
    forget()


def folder(rig: Rig) -> VoiceFolder:
    return voice_folder(rig.settings)


def cloner(rig: Rig) -> Cloner:
    assert isinstance(rig.pipeline, Cloner)
    return rig.pipeline


def line(text: str, *before: list[str], **generation: Any) -> dict[str, Any]:
    return {
        "example_id": text,
        "messages": [*before, ["user", "text", text]],
        **({"generation": generation} if generation else {}),
    }


def write(rig: Rig, *lines: dict[str, Any], name: str = "in.jsonl") -> Path:
    path = rig.folder / name
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def run(rig: Rig, job: Job) -> Job:
    while not rig.status(job).job.state.final:
        rig.run_next()
    return rig.ledger.job(job.id)


def recordings(rig: Rig, job: Job) -> list[str]:
    return [info.key for info in rig.store.list(references_prefix(job.id))]


def test_only_the_recordings_of_a_lost_input_are_read_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rig.folder / "first.wav").write_bytes(ANNA)
    (rig.folder / "second.wav").write_bytes(BEN)
    source = write(
        rig,
        line("First.", ["user", "audio", "first.wav"]),
        line("Second.", ["user", "audio", "second.wav"]),
    )
    monkeypatch.setattr(ShardSize, "of", lambda *_: ShardSize(10**9, 1))
    job = rig.submit_file(source)
    before = recordings(rig, job)
    (lost, _), _ = sorted(rig.ledger.shard_inputs(job.id).values())
    data = rig.store.get(lost)
    rig.store.delete(lost)
    (rig.folder / "second.wav").write_bytes(OTHER)
    rig.submit_file(source, lost=[lost])
    assert rig.store.get(lost) == data
    assert recordings(rig, job) == before


def test_a_job_keeps_its_voices_when_they_are_changed_and_deleted(rig: Rig) -> None:
    own = rig.folder / "own.wav"
    own.write_bytes(OTHER)
    source = write(
        rig,
        line("By the job."),
        line("By the line.", voice="ben"),
        line("By the model.", voice="heart"),
        line("Words of its own.", voice="anna", reference_text="Said otherwise."),
        line("By its own recording.", ["user", "audio", "own.wav"]),
        {"example_id": "talk", "messages": [["user", "text", "Who is it?"], ["assistant", "text", "Ben."]]},
    )
    generation = Generation(voice="anna", roles={"assistant": Generation(voice="ben")})
    job = rig.submit_file(source, generation=generation, speak="all")
    assert (job.total_items, job.rejected_lines) == (7, 0)
    (key,) = {key for key, _ in rig.ledger.shard_inputs(job.id).values()}
    before = rig.store.get(key)
    rig.store.delete(key)
    assert rig.submit_file(source, lost=[key], generation=generation, speak="all") == job
    assert rig.store.get(key) == before
    # Two lines with one voice store its recording once.
    assert len(recordings(rig, job)) == 3
    folder(rig).add("anna", OTHER, "Another one.")
    folder(rig).delete("ben")
    assert run(rig, job).state is JobState.COMPLETED
    asked = cloner(rig).voice_of
    assert asked("By the job.") == (None, [ANNA], "Anna speaks.")
    assert asked("By the line.") == (None, [BEN], None)
    assert asked("By the model.") == ("heart", [], None)
    assert asked("Words of its own.") == (None, [ANNA], "Said otherwise.")
    assert asked("By its own recording.") == (None, [OTHER], None)
    assert asked("Ben.") == (None, [BEN], None)
    # Exports name the voice.
    known = {item.id: item_metadata(job, item) for item in audio_items(rig.ledger, rig.store, job.id)}
    assert [(known[name].voice, known[name].speaker) for name in ("By the job.", "By the line.", "By the model.", "talk:turn1")] == [
        ("anna", "anna"), ("ben", "ben"), ("heart", "heart"), ("ben", "ben"),
    ]  # fmt: skip
    cloned = known["By its own recording."]
    assert (cloned.voice, cloned.speaker[:4]) == (None, "ref-")
    # The sweep knows the recordings.
    assert list(orphans(rig.ledger, rig.store, rig.ledger.job(job.id), rig.ledger.now() + 1e6)) == []
    # Lost audio comes back with the same bytes.
    assert {made.match for made in reproduce(rig.ledger, rig.store, job, rig.pipeline, 7)} == {"same"}
    (lost,) = [row.artifact for row in rig.items(job) if row.example_id == "By the line."]
    assert lost is not None
    rig.store.delete(lost.key)
    cloner(rig).asked.clear()
    assert repair_objects(
        rig.ledger, rig.store, job, rig.pipeline, [Expected(lost.key, lost.sha256, "audio", 1)]
    ) == {"same": 1}
    assert asked("By the line.") == (None, [BEN], None)


def test_another_recording_or_text_is_another_job_and_no_voice_changes_nothing(rig: Rig) -> None:
    named, plain = write(rig, line("Hello.", voice="anna")), write(rig, line("Hello."), name="plain.jsonl")
    first, bare = rig.submit_file(named), rig.submit_file(plain)
    assert first.spec.stored_voices == {
        "anna": FrozenVoice(recordings(rig, first)[0].rpartition("/")[2], "Anna speaks.")
    }
    assert rig.submit_file(named).id == first.id
    keyed = rig.submit_file(named, options=SubmitOptions(idempotency_key="mine"))
    # A voice that no line names is no part of a job.
    folder(rig).add("ben", OTHER, "")
    assert rig.submit_file(named).id == first.id
    others: set[str] = set()
    for recording, text in ((OTHER, "Anna speaks."), (ANNA, "Otherwise.")):
        folder(rig).add("anna", recording, text)
        others.add(rig.submit_file(named).id)
        assert rig.submit_file(plain).id == bare.id
        with pytest.raises(ServiceError, match="made from another input or spec"):
            rig.submit_file(named, options=SubmitOptions(idempotency_key="mine"))
    assert len(others | {first.id, keyed.id}) == 4
    folder(rig).add("anna", ANNA, "Anna speaks.")
    assert rig.submit_file(named).id == first.id
    assert recordings(rig, bare) == []


def test_tables_kaldi_and_batches_name_stored_voices(rig: Rig) -> None:
    table = rig.folder / "in.csv"
    table.write_text("id,text,voice,speaker\na,One.,anna,x\nb,Two.,,x\nc,Three.,nobody,x\n")
    job = rig.submit_file(
        table, options=SubmitOptions(input_format="csv"), reading=Reading(voices={"*": "ben"})
    )
    assert (run(rig, job).state, job.rejected_lines) == (JobState.COMPLETED_WITH_ERRORS, 1)
    assert [cloner(rig).voice_of(text)[1] for text in ("One.", "Two.")] == [[ANNA], [BEN]]
    (rig.folder / "text").write_text("u1 Four.\n")
    (rig.folder / "utt2spk").write_text("u1 s1\n")
    kaldi = rig.submit_file(
        rig.folder / "text",
        options=SubmitOptions(input_format="kaldi"),
        reading=Reading(voices={"s1": "anna"}),
    )
    assert run(rig, kaldi).state is JobState.COMPLETED
    assert cloner(rig).voice_of("Four.")[1] == [ANNA]
    body = {"model": "fake", "input": "Five.", "voice": "anna"}
    batch = write(
        rig,
        {"custom_id": "five", "method": "POST", "url": "/v1/audio/speech", "body": body},
        name="batch.jsonl",
    )
    assert (
        run(rig, rig.submit_file(batch, options=SubmitOptions(input_format="openai-batch"))).state
        is JobState.COMPLETED
    )
    assert cloner(rig).voice_of("Five.")[1] == [ANNA]


def test_a_dry_run_checks_voices_and_bad_ones_are_refused_by_line(rig: Rig) -> None:
    VoiceFolder(rig.folder, 10, 1 << 20).add("secret", ANNA, "")
    (folder(rig).path / "broken.voice").write_bytes(b"half")
    names = ["anna", "ana", "../secret", "secret.voice", "ANNA", "broken", "nobody"]
    own = ["user", "audio", "own.wav"]
    (rig.folder / "own.wav").write_bytes(OTHER)
    source = write(
        rig,
        *[line(name, voice=name) for name in names],
        line("both", own, voice="anna"),
        line("escape", voice="b\u0065n"),
    )
    source.write_bytes(source.read_bytes().replace(b'"voice": "ben"', b'"v\\u006fice": "ben"'))
    codes = [ErrorCode.INPUT_UNKNOWN_VOICE] * 4 + [
        ErrorCode.INPUT_AUDIO_UNREADABLE,
        ErrorCode.INPUT_UNKNOWN_VOICE,
    ]
    estimate = dry_run(rig.settings, rig.store, str(source), JobSpec("fake"))
    assert estimate.items == 2
    assert [refused.code for refused in estimate.rejected_lines] == [*codes, ErrorCode.INPUT_UNSUPPORTED]
    said = [refused.message for refused in estimate.rejected_lines]
    assert (
        said[0]
        == "The model fake has no voice 'ana'. It has: Heart. Did you mean 'anna'? `nightjar voices list` shows the stored voices."
    )
    assert (
        said[4]
        == "The stored voice 'broken' cannot be read: its file is damaged. Delete it, and add it again."
    )
    assert said[6] == "The line has a recording and the stored voice 'anna'. Leave one of them out."
    assert rig.store.objects == {}
    job = rig.submit_file(source)
    assert [refused.message for refused in rig.ledger.rejected_lines(job.id)] == said
    for generation in (Generation(voice="ana"), Generation(roles={"user": Generation(voice="broken")})):
        with pytest.raises(InputError):
            submit(rig.settings, rig.ledger, rig.store, str(source), JobSpec("fake", generation=generation))


def test_a_model_that_cannot_clone_refuses_a_stored_voice(rig: Rig) -> None:
    forget = register_pipeline("plain", replace(fake_card("plain"), capabilities=Capabilities()), Cloner)
    try:
        source = write(rig, line("Hello.", voice="anna"), line("Hello again."))
        (refused,) = dry_run(rig.settings, rig.store, str(source), JobSpec("plain")).rejected_lines
        assert (refused.code, "cannot clone" in refused.message) == (ErrorCode.INPUT_UNSUPPORTED, True)
        with pytest.raises(InputError) as caught:
            rig.submit_file(source, model="plain", generation=Generation(voice="anna"))
        assert caught.value.code is ErrorCode.INPUT_UNSUPPORTED
    finally:
        forget()


def test_a_voice_that_changes_while_a_job_is_submitted_leaves_no_job(rig: Rig) -> None:
    class Changing(Ledger):
        def begin_job(self, *given: Any, **named: Any) -> Job:
            folder(rig).add("anna", OTHER, "Anna speaks.")
            return super().begin_job(*given, **named)

    ledger, source = Changing(rig.settings.ledger_url), write(rig, line("Hello.", voice="anna"))
    with pytest.raises(InputError, match="was changed while the input was read"), closing(ledger):
        submit(rig.settings, ledger, rig.store, str(source), JobSpec("fake"))
    assert rig.ledger.jobs() == []
    assert rig.store.objects == {}


def test_lengths_are_judged_by_the_pace_of_the_stored_voice(rig: Rig) -> None:
    def pace(voice: str, base_seconds: float) -> Pace:
        return Pace(base_seconds, 0.01, 0.1, 10.0, voice=voice)

    quality = Quality(paces=(pace("anna", 1.0), pace("ben", 2.0), pace("", 3.0)))
    (rig.folder / "own.wav").write_bytes(OTHER)
    source = write(
        rig,
        line("One."),
        line("Two.", voice="ben"),
        line("Three.", ["user", "audio", "own.wav"]),
        line("Four.", voice="heart"),
    )
    job = rig.submit_file(source, generation=Generation(voice="anna"), quality=quality)
    run(rig, job)
    expected = {
        row.index: row.draw.scores["duration"].detail for row in rig.ledger.draws_of(job.id, range(4))
    }
    assert [expected[index][0] for index in range(4)] == ["1", "2", "3", "3"]


def test_the_recording_stands_before_its_text(rig: Rig) -> None:
    run(rig, rig.submit_file(write(rig, line("Hello.", ["system", "text", "calm"], voice="anna"))))
    roles = [(message.role, message.modality) for message in cloner(rig).asked["Hello."].messages]
    assert roles == [("system", "text"), ("user", "audio"), ("user", "text")]
    assert cloner(rig).asked["Hello."].messages[1] == Message("user", "audio", ANNA)
