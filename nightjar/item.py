"""One item of a job: its result, and its audio and text, which are read on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from jobs.dialogue import metadata_of
from jobs.ledger.records import ItemRow
from nightjar.voice import Sound
from pipelines.errors import ErrorCode, NotFoundError

if TYPE_CHECKING:
    from jobs.export.items import ItemMetadata
    from nightjar.job import Job
    from pipelines.request import Word


@dataclass(frozen=True)
class Item:
    """One item that has ended. Its text and its audio are read on demand, also after unpickling in another
    process."""

    #: Unique in the job: the example id, followed by the turn if several turns are synthesized.
    id: str
    example_id: str
    #: Position in the job, from 0.
    index: int
    #: `done`, `failed`, `dead` or `skipped`.
    state: str
    #: Length of the audio; 0 without audio.
    seconds: float
    seed: int | None
    #: Number of the draw (the attempt) that was kept; 0 is the first. None in a job without checks.
    draw: int | None
    #: Name of a score, such as `wer` -> its value; None: not measured.
    scores: Mapping[str, float | None]
    #: The error code of a failed item, and its message.
    error_code: str | None
    error: str | None
    #: Path or `s3://` address of the audio; None if there is none or if it is in a pack.
    path: str | None
    source: InitVar[tuple[Job, ItemRow]]
    #: Where audio and text are read from. Not a field, so it is neither shown nor compared.
    _source: ClassVar[tuple[Job, ItemRow]]

    def __post_init__(self, source: tuple[Job, ItemRow]) -> None:
        object.__setattr__(self, "_source", source)

    @property
    def audio(self) -> Sound:
        """The item's speech. Raises `store.missing` for an item without audio."""
        job, row = self._source
        if row.artifact is None:
            message = f"The item {self.id[:100]!r} has no audio: it is {self.state}."
            raise NotFoundError(ErrorCode.STORE_MISSING, message, self.error or "")
        return Sound(*job.audio_of(row.artifact), self.text)

    @property
    def text(self) -> str:
        """The requested text."""
        return self._metadata.text

    @property
    def spoken_text(self) -> str:
        """The text as it was spoken, which `normalize` and `lexicon` change."""
        return self._metadata.spoken_text

    @property
    def words(self) -> tuple[Word, ...]:
        """The words with their times, in a job with `timestamps`."""
        job, row = self._source
        return job.words_of(row)

    @property
    def speaker(self) -> str:
        """The name of the voice; for a cloned voice `ref-` and the beginning of the recording's hash; without a
        voice the name of the model."""
        return self._metadata.speaker

    @property
    def metadata(self) -> dict[str, Any]:
        """The other columns or keys of its record, with JSON's types."""
        job, row = self._source
        return metadata_of(job.line_of(row).dialogue)

    @property
    def _metadata(self) -> ItemMetadata:
        job, row = self._source
        return job.metadata_of(row)

    def _repr_html_(self) -> str:
        scores = ", ".join(f"{name} {value:.3g}" for name, value in self.scores.items() if value is not None)
        _, row = self._source
        shown = self.audio._repr_html_() if row.artifact else f"<p>{escape(self.error or self.state)}</p>"
        return f"<div><code>{escape(self.id)}</code> {self.seconds:.2f} s {escape(scores)}{shown}</div>"
