"""Paces that are learned from what was made, printed as a config."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from examples.paces import LEAST_ITEMS, as_toml, fit_pace, learned_paces
from jobs.checks import quality_of
from jobs.export.items import AudioItem
from jobs.ledger.records import Artifact, JobSpec
from pipelines.duration import Pace
from pipelines.errors import NotFoundError


def two_seconds(index: int) -> Artifact:
    return Artifact(index, "audio", f"{index}.wav", "", 0, 2000, 24_000, 48_000, 0)


class TestCalibration:
    def lengths(self, count: int, bad: int = 0) -> list[tuple[bytes, float, float]]:
        chance = np.random.default_rng(1)
        units = chance.uniform(20, 120, count)
        seconds = (0.3 + 0.06 * units) * chance.uniform(0.9, 1.1, count)
        seconds[:bad] *= 4
        return [(bytes([n % 256]), float(u), float(s)) for n, (u, s) in enumerate(zip(units, seconds))]

    def test_a_fifth_of_bad_items_hardly_moves_the_line(self) -> None:
        clean, soiled = fit_pace(self.lengths(300)), fit_pace(self.lengths(300, bad=60), "anna", "English")
        for pace in (clean, soiled):
            assert 0.7 < pace.low < 0.85
            assert 1.15 < pace.high < 1.35
            assert pace.expected_seconds("x" * 70) == pytest.approx(4.5, rel=0.15)
        assert (soiled.voice, soiled.language) == ("anna", "English")

    def test_texts_of_one_length_still_give_a_pace(self) -> None:
        pace = fit_pace([(b"", 50.0, 3.0), (b"", 50.0, 3.1), (b"", 50.0, 2.9)])
        assert pace.expected_seconds("x" * 50) == pytest.approx(3.0)

    def test_items_without_a_text_teach_nothing(self) -> None:
        def paces(texts: list[str]) -> tuple[Pace, ...]:
            lines = [
                msgspec.json.encode({"example_id": str(n), "messages": [["user", "text", text]]})
                for n, text in enumerate(texts)
            ]
            job: Any = SimpleNamespace(id="j", spec=JobSpec("fake"))
            made = [
                AudioItem(str(n), str(n), two_seconds(n), msgspec.Raw(line), job, 0)
                for n, line in enumerate(lines)
            ]
            return learned_paces(job, made)

        with pytest.raises(NotFoundError, match="0 finished items with a text"):
            paces([""] * LEAST_ITEMS)
        with pytest.raises(NotFoundError, match=f"{LEAST_ITEMS - 1} finished items"):
            paces(["", *["words"] * (LEAST_ITEMS - 1)])
        assert paces(["", *["words"] * LEAST_ITEMS]) == paces(["words"] * LEAST_ITEMS)

    def test_what_is_printed_is_a_config(self, tmp_path: Path) -> None:
        voice = 'a "quoted"\\ voice 𝄞 安娜\t\x7f\x01'
        paces = (fit_pace(self.lengths(50), voice), fit_pace(self.lengths(50)))
        path = tmp_path / "qa.toml"
        path.write_text(as_toml(paces), "utf-8")
        quality = quality_of("basic", path)
        assert quality is not None
        assert quality.paces == paces
