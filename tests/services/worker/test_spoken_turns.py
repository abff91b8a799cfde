"""Dialogues of several spoken turns, each in the voice of its role: made, retried, resumed, and exported
in every format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile

from jobs.ingest import submit
from jobs.ledger import Ledger
from jobs.ledger.records import ItemState, Job, JobSpec, NewShard
from jobs.repair import repair_objects, reproduce
from jobs.report import write_report
from jobs.shard_file import read_shard
from jobs.source import LineBatch
from jobs.spec import item_seed
from jobs.store import FolderStore
from jobs.verify import Expected
from pipelines.errors import ConfigError, ErrorCode
from pipelines.registry import register_pipeline
from pipelines.request import Capabilities, Generation, Speech, SynthesisRequest
from tests.support.checked_lines import line_checker
from tests.support.cli_kit import call
from tests.support.export_kit import export
from tests.support.fake_worker import fake_card
from tests.support.fakes import SAMPLE_RATE, FakePipeline, spoken_text
from tests.support.ledger_kit import new_job
from tests.support.manifests import read_manifest
from tests.support.times import with_times
from tests.support.worker_rig import Rig

HELLO = Path(__file__).parents[3] / "examples" / "hello.jsonl"
VOICES = Generation(voice="heart", roles={"assistant": Generation(voice="bella")})
TALK = {
    "example_id": "talk",
    "messages": [
        ["system", "text", "calm"],
        ["user", "text", "How late is it?"],
        ["assistant", "text", "Nine."],
        ["assistant", "audio", "old.wav"],
        ["user", "text", "Thank you very much."],
        ["assistant", "text", "You are welcome."],
    ],
    "kept": {"as": "it is"},
}
PLAIN = {"example_id": "plain", "messages": [["user", "text", "Only this."]]}
OWN = {
    "example_id": "own",
    "messages": [["user", "text", "And you?"], ["assistant", "text", "And me."]],
    "generation": {"voice": "bella", "roles": {"user": {"voice": "heart"}}},
}


class Voices(FakePipeline):
    """A fake of two voices that keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = Capabilities(voices=("heart", "bella"), instruct=True)
        self.asked: dict[str, tuple[str | None, int]] = {}

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        self.asked[spoken_text(request)] = (request.generation.voice, request.seed)
        return super().submit(request)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    forget = register_pipeline("fake", replace(fake_card(), capabilities=Voices().capabilities), Voices)
    rig = Rig(tmp_path, Voices())
    rig.store = FolderStore(tmp_path / "store")  # type: ignore[assignment]
    yield rig
    rig.close()
    forget()


def submitted(rig: Rig, *lines: dict[str, Any], max_items: int = 256, **spec: Any) -> Job:
    path = rig.folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = with_times(rig.settings, shard_items=max_items)
    return submit(
        settings,
        rig.ledger,
        rig.store,
        str(path),
        JobSpec("fake", **{"generation": VOICES, "speak": "all", **spec}),
    ).job


def run(rig: Rig, job: Job) -> None:
    while not rig.status(job).job.state.final:
        rig.run_next()


def exported(rig: Rig, job: Job, format: str, **counts: int) -> list[dict[str, Any]]:
    to = rig.folder / f"{format}.jsonl"
    report = export(rig.ledger, rig.store, job.id, format, str(to))
    if counts:
        assert {"items": report.items, "left_out": report.left_out} == counts
    return [json.loads(line) for line in to.read_text().splitlines()]


TEXTS = [
    "How late is it?",
    "Nine.",
    "Thank you very much.",
    "You are welcome.",
    "Only this.",
    "And you?",
    "And me.",
]
ROLES = ["user", "assistant", "user", "assistant", "user", "user", "assistant"]
SPEAKERS = ["heart", "bella", "heart", "bella", "heart", "heart", "bella"]
INDEXES = [1, 2, 4, 5, 0, 0, 1]
IDS = ["talk:turn0", "talk:turn1", "talk:turn2", "talk:turn3", "plain", "own:turn0", "own:turn1"]
EXAMPLES = ["talk"] * 4 + ["plain"] + ["own"] * 2


def test_every_turn_is_an_item_in_the_voice_of_its_role(rig: Rig) -> None:
    job = submitted(rig, TALK, PLAIN, OWN, max_items=3, seed=3)
    assert job.total_items == 7
    # A dialogue is not torn: a shard of four although three are enough.
    assert [len(read_shard(rig.store, *place)) for place in rig.ledger.shard_inputs(job.id).values()] == [
        4,
        3,
    ]
    run(rig, job)
    assert isinstance(rig.pipeline, Voices)
    seeds = [item_seed(3, example_id, index) for example_id, index in zip(EXAMPLES, INDEXES, strict=True)]
    assert rig.pipeline.asked == dict(zip(TEXTS, zip(SPEAKERS, seeds, strict=True), strict=True))
    rows = rig.items(job)
    assert [row.id for row in rows] == IDS
    assert [row.turn for row in rows] == [0, 1, 2, 3, 0, 0, 1]
    assert [redrawn.match for redrawn in reproduce(rig.ledger, rig.store, job, rig.pipeline, 7)] == [
        "same"
    ] * 7
    entries = [
        entry
        for shard in rig.ledger.shard_inputs(job.id)
        for entry in read_manifest(rig.store, f"jobs/{job.id}/manifest/{shard:06d}.jsonl")
    ]
    assert [(entry.text, entry.role, entry.message_index) for entry in entries] == list(
        zip(TEXTS, ROLES, INDEXES, strict=True)
    )


def test_dialogues_hold_the_audio_of_each_turn_behind_it(rig: Rig) -> None:
    job = submitted(rig, TALK, PLAIN, OWN)
    run(rig, job)
    talk, plain, own = exported(rig, job, "espnet", items=7, left_out=0)
    where = [f"store/{row.artifact.key}" for row in rig.items(job) if row.artifact]
    u1, a1, u2, a2 = (
        message for message in TALK["messages"] if message[1] == "text" and message[0] != "system"
    )
    assert talk == {
        **TALK,
        "messages": [
            ["system", "text", "calm"],
            *(u1, ["user", "audio", where[0]], a1, ["assistant", "audio", where[1]]),
            *(u2, ["user", "audio", where[2]], a2, ["assistant", "audio", where[3]]),
        ],
    }
    assert plain["messages"] == [["user", "text", "Only this."], ["assistant", "audio", where[4]]]
    assert [message[0] for message in own["messages"]] == ["user", "user", "assistant", "assistant"]
    for dialogue, lengths in ((talk, [15, 5, 20, 16]), (own, [8, 7])):
        audio = [
            soundfile.info(str(rig.folder / content))
            for _, modality, content in dialogue["messages"]
            if modality == "audio"
        ]
        # The fake's length tells its text.
        assert [info.frames for info in audio] == [
            SAMPLE_RATE // 20 + SAMPLE_RATE // 100 * length for length in lengths
        ]


def test_flat_formats_have_a_row_a_turn(rig: Rig) -> None:
    job = submitted(rig, TALK, PLAIN, OWN)
    run(rig, job)
    for name in ("manifest", "nemo"):
        rows = exported(rig, job, name, items=7, left_out=0)
        assert [(row["example_id"], row["text"], row["role"], row["message_index"]) for row in rows] == list(
            zip(EXAMPLES, TEXTS, ROLES, INDEXES, strict=True)
        )
    assert [row["speaker"] for row in rows] == SPEAKERS
    assert [row["custom_id"] for row in exported(rig, job, "openai-batch")] == IDS


def test_folders_read_back_by_their_libraries(rig: Rig) -> None:
    lhotse, webdataset, datasets = (
        pytest.importorskip(name) for name in ("lhotse", "webdataset", "datasets")
    )
    job = submitted(rig, TALK, PLAIN, OWN)
    run(rig, job)
    for name in ("kaldi", "lhotse", "shar", "webdataset", "parquet", "espnet-dataset"):
        report = export(rig.ledger, rig.store, job.id, name, str(rig.folder / name))
        assert (report.items, report.left_out) == (7, 0)
    kaldi = dict(line.split(" ", 1) for line in (rig.folder / "kaldi/train/text").read_text().splitlines())
    assert kaldi == {
        f"{speaker}-{row.replace(':', '~3A')}": text
        for speaker, row, text in zip(SPEAKERS, IDS, TEXTS, strict=True)
    }
    shar = lhotse.CutSet.from_shar(in_dir=rig.folder / "shar/train")
    for cuts in (lhotse.CutSet.from_file(rig.folder / "lhotse/train/cuts.jsonl.gz"), shar):
        said = [
            (cut.supervisions[0].custom["role"], cut.supervisions[0].speaker, cut.supervisions[0].text)
            for cut in cuts
        ]
        assert said == list(zip(ROLES, SPEAKERS, TEXTS, strict=True))
    manifest = lhotse.CutSet.from_file(rig.folder / "lhotse/train/cuts.jsonl.gz")
    assert [cut.id for cut in manifest] == IDS
    samples = list(
        webdataset.WebDataset(str(rig.folder / "webdataset/train/shard-000000.tar"), shardshuffle=False)
    )
    about = [json.loads(sample["json"]) for sample in samples]
    assert [(one["example_id"], one["role"], one["speaker"], one["text"]) for one in about] == list(
        zip(EXAMPLES, ROLES, SPEAKERS, TEXTS, strict=True)
    )
    rows = datasets.load_dataset(
        "parquet",
        data_files=str(next((rig.folder / "parquet/data").iterdir())),
        split="train",
        cache_dir=str(rig.folder / "cache"),
    )
    assert [rows[name] for name in ("example_id", "role", "message_index", "speaker", "text")] == [
        EXAMPLES,
        ROLES,
        INDEXES,
        SPEAKERS,
        TEXTS,
    ]
    espnet = rig.folder / "espnet-dataset/train"
    assert json.loads((espnet / "audio_text.json").read_text())["samples"] == sorted(IDS)
    assert json.loads((espnet / "dialogue.json").read_text())["samples"] == ["own", "plain", "talk"]
    texts = [json.loads(line) for line in (espnet / "text.jsonl").read_text().splitlines()]
    assert [(line["id"], line["text"]) for line in texts] == list(zip(IDS, TEXTS, strict=True))
    assert [
        json.loads(line)["example_id"] for line in (espnet / "dialogue.jsonl").read_text().splitlines()
    ] == ["talk", "plain", "own"]
    recordings = gzip.decompress((espnet / "audio/recordings.jsonl.gz").read_bytes()).splitlines()
    assert [json.loads(line)["id"] for line in recordings] == IDS


def test_a_dialogue_that_lacks_a_turn_is_left_out_until_it_is_retried(rig: Rig) -> None:
    broken = {
        "example_id": "broken",
        "messages": [["user", "text", "Well?"], ["assistant", "text", "[[fail_once:synth.no_eos]] So."]],
    }
    job = submitted(rig, broken, PLAIN)
    run(rig, job)
    assert [row.state for row in rig.items(job)] == [ItemState.DONE, ItemState.FAILED, ItemState.DONE]
    assert [line["example_id"] for line in exported(rig, job, "espnet", items=1, left_out=2)] == ["plain"]
    for name, made in (("espnet-dataset", 1), ("lhotse", 2)):
        report = export(rig.ledger, rig.store, job.id, name, str(rig.folder / f"before-{name}"))
        assert (report.items, report.left_out) == (made, 3 - made)
    (error,) = exported(rig, job, "openai-batch-errors")
    assert error["custom_id"] == "broken:turn1"
    page = rig.folder / "report.html"
    write_report(rig.ledger, rig.store, job.id, page)
    assert "broken:turn1" in page.read_text()
    before = {row.index: row.artifact for row in rig.items(job)}
    assert rig.ledger.retry(job.id, None) == 1
    run(rig, job)
    after = {row.index: row.artifact for row in rig.items(job)}
    assert (after[0], after[2]) == (before[0], before[2])
    assert [line["example_id"] for line in exported(rig, job, "espnet", items=3, left_out=0)] == [
        "broken",
        "plain",
    ]


def test_inputs_and_audio_of_turns_are_made_again(rig: Rig) -> None:
    job = submitted(rig, TALK, PLAIN, OWN)
    run(rig, job)
    ((key, sha256),) = rig.ledger.shard_inputs(job.id).values()
    rig.store.delete(key)
    rig.submit_file(rig.folder / "in.jsonl", lost=[key], generation=VOICES, speak="all")
    assert len(read_shard(rig.store, key, sha256)) == 7
    lost = rig.items(job)[3].artifact
    assert lost is not None
    before = rig.store.get(lost.key)
    rig.store.delete(lost.key)
    expected = Expected(lost.key, lost.sha256, "audio", 3, "talk", lost.bytes)
    assert repair_objects(rig.ledger, rig.store, job, rig.pipeline, [expected]) == {"same": 1}
    assert rig.store.get(lost.key) == before


def test_a_resumed_ingest_counts_turns(rig: Rig, short_batches: None) -> None:
    staged = rig.ledger.stage

    def once(job_id: str, shards: list[NewShard], *rest: Any) -> bool:
        if shards[0].no:
            raise ConnectionError
        return staged(job_id, shards, *rest)

    lines = [{**TALK, "example_id": f"talk-{number}"} for number in range(6)]
    rig.ledger.stage = once  # type: ignore[method-assign, assignment]
    with pytest.raises(ConnectionError):
        submitted(rig, *lines)
    rig.ledger.stage = staged  # type: ignore[method-assign]
    job = submitted(rig, *lines)
    assert (job.total_items, job.lines_read) == (24, 6)
    assert [row.id for row in rig.items(job)] == [
        f"talk-{number}:turn{turn}" for number in range(6) for turn in range(4)
    ]
    run(rig, job)
    assert len(exported(rig, job, "espnet", items=24, left_out=0)) == 6


def test_an_id_is_one_dialogues_whatever_its_turns(rig: Rig, short_batches: None) -> None:
    job = submitted(
        rig, TALK, PLAIN, OWN, {**PLAIN, "example_id": "talk"}, TALK, {**OWN, "example_id": "last"}
    )
    # Of the batches with a repeated id only that is left out, not the dialogue of several turns beside it.
    assert (job.total_items, job.rejected_lines) == (9, 2)
    refused = [(line.line, line.code) for line in rig.ledger.rejected_lines(job.id)]
    assert refused == [(4, ErrorCode.INPUT_DUPLICATE_ID), (5, ErrorCode.INPUT_DUPLICATE_ID)]


def test_turns_on_either_database(ledger: Ledger) -> None:
    job = ledger.begin_job(new_job())
    ledger.stage(
        job.id,
        [
            NewShard(0, ((0, "a"), (1, "a"), (2, "b")), "k", "s", 1, {1: 1}),
            NewShard(1, ((3, "c"),), "k1", "s1", 1),
        ],
        [],
        3,
    )
    ledger.seal_job(job.id)
    assert [(row.id, row.turn, row.several) for row in ledger.items(job.id)] == [
        ("a:turn0", 0, True),
        ("a:turn1", 1, True),
        ("b", 0, False),
        ("c", 0, False),
    ]


@pytest.mark.parametrize(
    ("speak", "spoken"),
    [("user", TEXTS[0:3:2] + TEXTS[4:6]), ("assistant", ["Nine.", "You are welcome.", "And me."])],
)
def test_one_role_alone(rig: Rig, speak: str, spoken: list[str]) -> None:
    job = submitted(rig, TALK, PLAIN, OWN, speak=speak)
    run(rig, job)
    assert [row["text"] for row in exported(rig, job, "nemo")] == spoken
    assert job.rejected_lines == (1 if speak == "assistant" else 0)


def test_what_no_model_or_input_has_is_refused(rig: Rig) -> None:
    from jobs.ingest import SubmitOptions

    source = str(rig.folder / "in.jsonl")
    Path(source).write_text("{}\n")
    batch = SubmitOptions(input_format="openai-batch")
    with pytest.raises(ConfigError, match="OpenAI batch"):
        submit(rig.settings, rig.ledger, rig.store, source, JobSpec("fake", speak="assistant"), options=batch)
    forget = register_pipeline(
        "answers", replace(fake_card(), capabilities=Capabilities(multi_turn=True)), Voices
    )
    try:
        with pytest.raises(ConfigError, match="answers a whole dialogue"):
            submit(rig.settings, rig.ledger, rig.store, source, JobSpec("answers", speak="user"))
        assert submitted(rig, TALK, generation=Generation(), speak="auto").spec.speak == "auto"
    finally:
        forget()


@pytest.mark.parametrize(
    "capabilities", [Capabilities(voices=("heart", "bella")), Capabilities(cloning=True)]
)
def test_the_export_of_a_user_alone_is_submitted_again(rig: Rig, capabilities: Capabilities) -> None:
    job = submitted(rig, PLAIN, generation=Generation(voice="heart"), speak="auto")
    run(rig, job)
    assert [message[:2] for message in exported(rig, job, "espnet")[0]["messages"]] == [
        ["user", "text"],
        ["assistant", "audio"],
    ]
    checker = line_checker(replace(fake_card(), capabilities=capabilities), Generation(), speak="auto")
    (good,), refused = checker.check(LineBatch(1, [(rig.folder / "espnet.jsonl").read_bytes().strip()]), str)
    assert (good.turns, dict(good.references), refused) == ((0,), {}, [])


def test_hello_03_on_the_command_line(tmp_path: Path) -> None:
    """The shipped example, through the real command: the assistant's sentence is what its audio says."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(line + "\n" for line in HELLO.read_text().splitlines() if "hello-03" in line))
    done = call(tmp_path, "run", str(source), "--out", "out", "--json")
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout.splitlines()[-1])["job"]
    made = call(tmp_path, "export", job, "--format", "espnet", "--home", "out")
    messages = json.loads(made.stdout)["messages"]
    assert [message[:2] for message in messages] == [
        ["user", "text"],
        ["assistant", "text"],
        ["assistant", "audio"],
    ]
    row = json.loads(call(tmp_path, "export", job, "--format", "nemo", "--home", "out").stdout)
    assert (row["text"], row["role"]) == (messages[1][2], "assistant")
    (item,) = [
        json.loads(line)
        for line in call(tmp_path, "items", job, "--json", "--home", "out").stdout.splitlines()
    ]
    assert (item["id"], item["turn"]) == ("hello-03", 0)
