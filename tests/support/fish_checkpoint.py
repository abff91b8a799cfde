"""The golden checkpoint of Fish Speech S2 as a folder that opens."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "fish"


@cache
def whole(golden: Path = GOLDEN) -> Path:
    """A copy of the checkpoint with the codec's sizes in it where the folder has some; it lives as long as
    the process."""
    folder = Path(tempfile.mkdtemp(prefix="nightjar-fish-golden-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = shutil.copytree(golden / "checkpoint", folder / "checkpoint", copy_function=shutil.copyfile)
    if (golden / "codec_config.json").is_file():
        shutil.copyfile(golden / "codec_config.json", copy / "codec_config.json")
    return copy
