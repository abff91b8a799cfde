"""A run with a Qwen3-TTS checkpoint that clones a stored voice, which is deleted when the job is there and
nothing of it is made."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from jobs.console import Stop
from jobs.embedded import embedded_settings
from jobs.ingest import SubmitOptions
from jobs.ledger import Ledger
from jobs.ledger.records import Job, JobSpec, JobState
from jobs.local_run import run_locally
from jobs.progress import Progress
from jobs.repair import repair_objects
from jobs.settings import load_settings
from jobs.spec import resolve
from jobs.store import open_store
from jobs.verify import expected_objects, listed_faults
from jobs.voices import voice_folder
from pipelines.errors import InputError
from pipelines.registry import open_pipeline
from pipelines.request import Generation
from tests.support.golden_checkpoint import whole

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3_tts"
RECORDING = (GOLDEN / "refs" / "ref_a_24k_mono.wav").read_bytes()
TEXT = "Good morning, and welcome."
#: The same text, once in the stored voice and once with what is in it.
LINES = [
    {"example_id": "stored", "messages": [["user", "text", "Hello there."]], "generation": {"seed": 7}},
    {
        "example_id": "own",
        "messages": [["user", "audio", "a.wav"], ["user", "text", "Hello there."]],
        "generation": {"seed": 7, "reference_text": TEXT},
    },
    {
        "example_id": "unlike",
        "messages": [["user", "text", "Hello there."]],
        "generation": {"seed": 7, "voice": "ben"},
    },
]


def test_a_voice_that_is_deleted_before_the_work_begins_speaks_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.wav").write_bytes(RECORDING)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    chosen = load_settings(home="out")
    settings, voices = embedded_settings(chosen), voice_folder(chosen)
    voices.add("anna", RECORDING, TEXT)
    voices.add("ben", (GOLDEN / "refs" / "ref_b_24k_mono.wav").read_bytes(), "")
    model = str(whole(GOLDEN / "checkpoint-base"))
    spec = JobSpec(model, generation=Generation(voice="anna"))
    jobs: list[Job] = []

    def submitted(job: Job) -> None:
        """The job is in the ledger, and no worker was told of it yet."""
        jobs.append(job)
        assert [voices.delete(name) for name in voices.names()] == [True, True]

    resolved, options = resolve(spec, stored=voices), SubmitOptions()
    progress, stop = Progress(quiet=True), Stop()
    status, _ = run_locally(settings, "in.jsonl", resolved, options, None, progress, stop, submitted)
    assert (status.job.state, status.items.done) == (JobState.COMPLETED, 3)
    (job,) = jobs
    store = open_store(settings.effective_store_url)
    with closing(Ledger.of(settings)) as ledger:
        rows = list(ledger.items(job.id))
        made = [store.get(row.artifact.key) for row in rows if row.artifact]
        assert made[0] == made[1] != made[2]
        # What is lost comes back with the same bytes, without the voice.
        for row in rows[:2]:
            assert row.artifact is not None
            store.delete(row.artifact.key)
        lost = [expected for expected, _ in listed_faults(store, expected_objects(ledger, job.id))]
        with closing(open_pipeline(model)) as pipeline:
            assert repair_objects(ledger, store, ledger.job(job.id), pipeline, lost) == {"same": 2}
    with pytest.raises(InputError, match="has no voice 'anna'"):
        resolve(spec, stored=voices)
