"""The golden checkpoint of SpeechLM under the names by which checkpoints are published."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden" / "speechlm"


def renamed(content: dict[str, Any], name: str) -> dict[str, Any]:
    """A config.json as the converter of that name writes it: `name`, with `_text` and `_audio_encoder`
    behind it; no type of weights."""
    kinds = {"text_config": "text", "audio_config": "audio_encoder"}
    parts = {key: content[key] | {"model_type": f"{name}_{kind}"} for key, kind in kinds.items()}
    architecture = "SpeechLM" if name == "speechlm" else name.capitalize()
    typeless = {key: value for key, value in content.items() if key != "torch_dtype"}
    return (
        typeless | parts | {"model_type": name, "architectures": [f"{architecture}ForConditionalGeneration"]}
    )


@cache
def named(name: str, checkpoint: Path = GOLDEN / "checkpoint") -> Path:
    """A copy of a checkpoint whose `model_type` is `name`; it lives as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="nightjar-speechlm-golden-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = shutil.copytree(checkpoint, folder / checkpoint.name, copy_function=shutil.copyfile)
    content = renamed(json.loads((copy / "config.json").read_text(encoding="utf-8")), name)
    (copy / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return copy
