"""A job over a SparkTTS checkpoint folder on our own engine, where vLLM cannot be imported: created and
cloned voices."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jobs.ledger import Ledger
from jobs.provenance import read_records
from jobs.settings import load_settings
from jobs.store import open_store
from pipelines.registry import open_pipeline
from pipelines.request import Generation, Message, SynthesisRequest, submit
from tests.support.vllm_kit import GOLDEN, checkpoint

TEXT = "Good morning, how are you today?"
WAV = "ref_a.wav"
SPOKEN: dict[str, str | None] = {"reference_text": "The train to the city leaves at nine."}
#: Of each line: whether it clones the recording, and its settings. Greedy, so that any process makes the
#: same.
LINES: dict[str, tuple[bool, dict[str, str | None]]] = {
    "created": (False, {"voice": "female/high/low"}),
    "default": (False, {}),
    "cloned": (True, {}),
    "continued": (True, SPOKEN),
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose job is done."""
    shutil.copy(GOLDEN / "wavs" / WAV, tmp_path)
    with (tmp_path / "input.jsonl").open("w") as file:
        for name, (clones, settings) in LINES.items():
            messages = [*([["user", "audio", WAV]] if clones else []), ["user", "text", TEXT]]
            file.write(
                json.dumps(
                    {"example_id": name, "messages": messages, "generation": settings | {"temperature": 0.0}}
                )
                + "\n"
            )
    broken = tmp_path / "path" / "vllm"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise AssertionError('vLLM was imported')\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), str(broken.parent)]),
    }
    command = [sys.executable, "-m", "jobs", "run", "input.jsonl", "--model", str(checkpoint()), "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["items"]["done"], summary["items"]["failed"]) == (len(LINES), 0)
    return tmp_path / "out"


def test_every_line_is_spoken_by_our_engine_and_its_records_say_so(home: Path) -> None:
    store = open_store(str(home))
    with closing(Ledger.of(load_settings(home=str(home)))) as ledger:
        (job,) = ledger.jobs()
        keys = {row.example_id: row.artifact.key for row in ledger.items(job.id) if row.artifact is not None}
    assert [(one.model.family, one.model.engine) for one in read_records(store, job)] == [
        ("spark_tts", "native")
    ]
    with closing(open_pipeline(str(checkpoint()), engine="native")) as pipeline:
        for name, (clones, settings) in LINES.items():
            messages = [Message("user", "audio", (GOLDEN / "wavs" / WAV).read_bytes())] if clones else []
            asked = SynthesisRequest(
                name, (*messages, Message("user", "text", TEXT)), Generation(**settings, temperature=0.0)
            )
            speech = submit(pipeline, asked).result(240)
            stored, rate = soundfile.read(io.BytesIO(store.get(keys[name])), dtype="float32")
            assert rate == speech.sample_rate
            np.testing.assert_allclose(stored, speech.samples, atol=2 / 32768)
