"""Keys that could leave the store, or that a store could not hold, are refused before any store sees them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.store.base import split_key
from pipelines.errors import ErrorCode, StoreError

BAD = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    ".hidden",
    "a/.b",
    "a\\b",
    "a\0b",
    "a\nb",
    "a\u2028b",
    "\ud800",
]
BAD += ["x" * 256, "/".join(["abcd"] * 210), "ä" * 128]


@pytest.mark.parametrize("key", BAD)
def test_a_bad_key_is_refused(key: str) -> None:
    with pytest.raises(StoreError) as caught:
        split_key(key)
    assert caught.value.code is ErrorCode.STORE_BAD_KEY


def test_a_good_key_is_split() -> None:
    assert split_key("jobs/01J/audio/00000/000000001-a b_ü.wav") == [
        "jobs",
        "01J",
        "audio",
        "00000",
        "000000001-a b_ü.wav",
    ]


@given(st.text(max_size=40))
def test_no_accepted_key_has_a_part_that_climbs(key: str) -> None:
    try:
        segments = split_key(key)
    except StoreError:
        return
    assert all(segment not in ("", ".", "..") and "\0" not in segment for segment in segments)
    assert "/".join(segments) == key
