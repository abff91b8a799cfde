"""A voice of a random checkpoint whose speech is as long as each text says: a plug-in for jobs whose every
length is known.

A text's first word is the number of its frames. The engine does not know it: as in
`benchmarks.qwen3_load`, the weights draw the end at the first frame that `min_new_tokens` allows.
Everything else is the family's own pipeline. Where the voice plants audio, the samples of a speech are
replaced by as many of a speech-like signal, so that noise passes the checks of `--qa basic`.

`install` writes this file into a folder as what pip would write of a package, beside a JSON file that
names the checkpoint. So it imports nothing of the benchmarks, and works with any version of the packages
below.

`hide` takes a GPU from the processes that open such a voice from then on: they see an index that no host
has, so CUDA itself finds nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.errors import EngineCrashError, ErrorCode
from pipelines.registry import ENTRY_POINT_GROUP, FAMILIES, ModelCard, recognise
from pipelines.request import Done, Event, Handle, OnEvent, Pipeline, PreparedRequest, SynthesisRequest

#: A file beside the voices with the names of GPUs that are hidden.
_HIDDEN = "hidden"
_NO_SUCH_GPU = "63"
#: Seconds of the planted signal: no utterance is longer.
_LONGEST_SECONDS = 30


def planted_frames(text: str) -> int:
    """The frames that a text asks for."""
    return int(text.split(maxsplit=1)[0])


@cache
def speech_like(rate: int) -> NDArray[np.float32]:
    """Harmonics of a gliding pitch in syllables of a quarter of a second, with a soft floor of noise:
    float32 [samples]."""
    times = np.arange(_LONGEST_SECONDS * rate) / rate
    phase = 2 * np.pi * np.cumsum(120 + 20 * np.sin(2 * np.pi * 0.7 * times)) / rate
    buzz = sum(np.sin(order * phase) / order for order in range(1, 12))
    syllables = 0.15 + 0.85 * np.clip(np.sin(2 * np.pi * 4 * times), 0, None)
    noise = np.random.default_rng(0).standard_normal(len(times))
    return (0.15 * syllables * buzz + 0.002 * noise).astype(np.float32)


def _planted_class(audio: bool) -> type:
    """The pipeline of the family; made when a model is opened, since it imports torch."""
    from pipelines.qwen3_tts.pipeline import Qwen3TTSPipeline

    class PlantedPipeline(Qwen3TTSPipeline):
        def _generation(self, request: Any, task: Any, parts: Any, voice: Any) -> Any:
            generation, info = super()._generation(request, task, parts, voice)
            sampling = replace(generation.sampling, min_new_tokens=planted_frames(info.text))
            return replace(generation, sampling=sampling), info

        def start(
            self, request: SynthesisRequest | PreparedRequest, on_event: OnEvent, stream: bool = False
        ) -> Handle:
            return super().start(
                request, with_planted_audio(on_event) if audio and not stream else on_event, stream
            )

    return PlantedPipeline


def with_planted_audio(on_event: OnEvent) -> OnEvent:
    """Hears of the same speech with other samples, as many."""

    def planted(event: Event) -> None:
        if isinstance(event, Done):
            said = event.speech
            event = Done(replace(said, samples=speech_like(said.sample_rate)[: len(said.samples)]))
        on_event(event)

    return planted


def _installed() -> dict[str, Any]:
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def describe() -> ModelCard:
    """The card of the checkpoint."""
    folder = Path(_installed()["checkpoint"])
    return recognise(folder, FAMILIES).call(".config", "describe", folder)


def load(**options: Any) -> Pipeline:
    """Opens the checkpoint as its family does, with planted lengths."""
    from pipelines.options import read_options
    from pipelines.qwen3_tts.pipeline import PipelineOptions

    found = _installed()
    if not _is_hidden():
        options |= {"device": found["device"]} if found["device"] else {}
    elif found["device"] == "cpu":
        # What a GPU's worker meets: without a driver no GPU is looked for.
        raise EngineCrashError(
            ErrorCode.WORKER_CRASH, "PyTorch does not find the GPU that this process was given."
        )
    return _planted_class(found["audio"])(Path(found["checkpoint"]), read_options(PipelineOptions, options))


def _is_hidden() -> bool:
    """Whether this process's GPU is hidden; if so, CUDA will not find one."""
    hidden = Path(__file__).with_name(_HIDDEN)
    if (
        not hidden.exists()
        or os.environ.get("CUDA_VISIBLE_DEVICES") not in hidden.read_text(encoding="utf-8").split()
    ):
        return False
    os.environ["CUDA_VISIBLE_DEVICES"] = _NO_SUCH_GPU
    return True


def hide(folder: Path, gpu: str) -> None:
    """Hides a GPU, as CUDA_VISIBLE_DEVICES names it, from the voices of a folder."""
    with (folder / _HIDDEN).open("a", encoding="utf-8") as file:
        file.write(f"{gpu}\n")


def show_all(folder: Path) -> None:
    """Hides no GPU any more."""
    (folder / _HIDDEN).unlink(missing_ok=True)


def install(folder: Path, name: str, checkpoint: Path, *, audio: bool = False, device: str = "") -> None:
    """Writes what pip would write of a package with a voice of this name; `folder` belongs into a
    process's PYTHONPATH. `device`: on which it is opened; empty: as any model."""
    module = name.replace("-", "_")
    info = folder / f"{module}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{name} = {module}\n")
    shutil.copyfile(__file__, folder / f"{module}.py")
    (folder / f"{module}.json").write_text(
        json.dumps({"checkpoint": str(checkpoint.absolute()), "audio": audio, "device": device})
    )
