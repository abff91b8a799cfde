"""One item of a job: its facts, and its audio and text, which are read on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from html import escape
from typing import TYPE_CHECKING, ClassVar

from jobs.ledger.records import ItemRow
from nightjar.voice import Sound
from pipelines.errors import ErrorCode, NotFoundError

if TYPE_CHECKING:
    from jobs.export.items import ItemMetadata
    from nightjar.job import Job


@dataclass(frozen=True)
class Item:
    """One item that has ended. Its text and its audio are read on demand, also after unpickling in another
    process."""

    #: Unique in the job: the example id, with the turn where several are synthesized.
    id: str
    example_id: str
    #: Its place in the job, from 0.
    index: int
    #: `done`, `failed`, `dead` or `skipped`.
    state: str
    #: Seconds of its audio.
    seconds: float
    seed: int | None
    #: Number of the attempt that was kept; 0 is the first.
    draw: int | None
    #: Name of a check or meter -> its score of the audio; None: not measured.
    scores: Mapping[str, float | None]
    #: Why it failed: a code, and a sentence.
    error_code: str | None
    error: str | None
    #: Path or `s3://` address of its audio; None without audio, and for audio in a pack.
    path: str | None
    source: InitVar[tuple[Job, ItemRow]]
    #: The source of audio and text; not a field.
    _source: ClassVar[tuple[Job, ItemRow]]

    def __post_init__(self, source: tuple[Job, ItemRow]) -> None:
        object.__setattr__(self, "_source", source)

    @property
    def audio(self) -> Sound:
        """Its speech. Raises `store.missing` for an item without audio."""
        job, row = self._source
        if row.artifact is None:
            message = f"The item {self.id[:100]!r} has no audio: it is {self.state}."
            raise NotFoundError(ErrorCode.STORE_MISSING, message, self.error or "")
        return Sound(*job.audio_of(row.artifact), self.text)

    @property
    def text(self) -> str:
        """The spoken text."""
        return self._metadata.text

    @property
    def speaker(self) -> str:
        """Its voice; for a cloned one `ref-` and the beginning of the recording's hash; without a voice the
        model."""
        return self._metadata.speaker

    @property
    def _metadata(self) -> ItemMetadata:
        job, row = self._source
        return job.metadata_of(row)

    def _repr_html_(self) -> str:
        scores = ", ".join(f"{name} {value:.3g}" for name, value in self.scores.items() if value is not None)
        _, row = self._source
        shown = self.audio._repr_html_() if row.artifact else f"<p>{escape(self.error or self.state)}</p>"
        return f"<div><code>{escape(self.id)}</code> {self.seconds:.2f} s {escape(scores)}{shown}</div>"
