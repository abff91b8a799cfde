"""Settings with other times of the protocol than an installation has."""

from __future__ import annotations

import msgspec

from jobs.settings import Settings


def with_times(settings: Settings, **times: float) -> Settings:
    """A copy of the settings; `times` are fields of `jobs.times.Times`."""
    copy = settings.model_copy()
    copy._times = msgspec.structs.replace(settings.times, **times)  # pyright: ignore[reportPrivateUsage]
    return copy
