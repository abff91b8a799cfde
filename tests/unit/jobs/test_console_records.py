"""Records that commands print as a table of their fields."""

from __future__ import annotations

import pytest

from jobs.console import SHOWN_ENTRIES, Output


def test_a_large_object_is_counted_and_a_small_one_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    few = {f"voice-{number}": 1.0 for number in range(SHOWN_ENTRIES)}
    view = {"pool": {"weights": few, "others": {**few, "one more": 1.0}}}
    Output().record(view)
    shown = capsys.readouterr().out
    assert f"{SHOWN_ENTRIES + 1} entries, see --json\n" in shown.partition("pool.others")[2]
    assert shown.count("pool.weights.voice-") == SHOWN_ENTRIES
    assert "one more" not in shown
