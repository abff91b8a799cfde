"""Jobs to report on, and a strict reader of the page."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from jobs.checks import Quality
from jobs.ingest import submit
from jobs.ledger.records import Job, JobSpec
from jobs.report import ReportResult, write_report
from jobs.store import open_store
from pipelines.registry import register_pipeline
from pipelines.request import Speech, SynthesisRequest
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.times import with_times
from tests.support.worker_rig import Rig

HOSTILE = '</script></td></table><script>window.hit=1</script><img src=x onerror="window.hit=2">&lt;\x07\u202e{{ 7*7 }}'
_VOID = {"meta", "img", "link", "br", "hr", "input"}


class ClippingPipeline(FakePipeline):
    """Clips the speech of texts with `[[clipped]]`, whose codes and words stay as they are."""

    def _finish(self, request: SynthesisRequest, future: Future[Speech]) -> None:
        whole: Future[Speech] = Future()
        super()._finish(request, whole)
        if whole.exception() or "[[clipped]]" not in str(request.messages[0].content):
            whole.add_done_callback(
                lambda done: (
                    future.set_exception(done.exception())
                    if done.exception()
                    else future.set_result(done.result())
                )
            )
            return
        speech = whole.result()
        clipped = np.clip(speech.samples * 9, -0.5, 0.5).astype(np.float32)
        future.set_result(replace(speech, samples=clipped))


class Desk:
    """A rig with a folder store and small shards, and the reports it writes."""

    def __init__(self, folder: Path, items_a_shard: int = 4, pipeline: FakePipeline | None = None) -> None:
        self.rig = Rig(folder, pipeline, commit_seconds=600.0)
        self.rig.settings = with_times(self.rig.settings, shard_items=items_a_shard)
        self.rig.store = open_store(str(folder))  # pyright: ignore[reportAttributeAccessIssue]

    def job(
        self,
        texts: Sequence[str],
        *,
        run: bool = True,
        bad_lines: int = 0,
        quality: Quality | None = None,
        spec: dict[str, Any] | None = None,
        **line: Any,
    ) -> Job:
        path = self.rig.folder / "in.jsonl"
        lines = [
            {"example_id": f"item-{n}", "messages": [["user", "text", text]], **line}
            for n, text in enumerate(texts)
        ]
        path.write_text("".join(json.dumps(one) + "\n" for one in lines) + "no json\n" * bad_lines)
        job_spec = JobSpec(model="fake", quality=quality, **spec or {})
        job = submit(self.rig.settings, self.rig.ledger, self.rig.store, str(path), job_spec).job
        while run and not self.rig.ledger.job(job.id).state.final:
            self.rig.run_next()
        return self.rig.ledger.job(job.id)

    def report(self, job: Job, to: Path | None = None, **options: Any) -> tuple[Document, ReportResult]:
        place = to or self.rig.folder / "report.html"
        result = write_report(self.rig.ledger, self.rig.store, job.id, place, **options)
        return read_page(place.read_text()), result


@contextmanager
def open_desk(folder: Path, pipeline: FakePipeline | None = None) -> Generator[Desk]:
    """A desk whose model is known to this process."""
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    desk = Desk(folder, pipeline=pipeline)
    try:
        yield desk
    finally:
        desk.rig.close()
        forget()


@dataclass
class Element:
    """An element with what is in it."""

    name: str
    attributes: dict[str, str]
    parent: Element | None
    children: list[Element] = field(default_factory=list["Element"])
    texts: list[str] = field(default_factory=list[str])

    def all(self, name: str = "", **wanted: str) -> list[Element]:
        """Every element below of a name, with these attributes."""
        found: list[Element] = []
        for child in self.children:
            if name in ("", child.name) and all(
                child.attributes.get(key.strip("_")) == value for key, value in wanted.items()
            ):
                found.append(child)
            found += child.all(name, **wanted)
        return found

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def whole_text(self) -> str:
        """All text in order, as near as matters here."""
        return " ".join([self.text, *(child.whole_text() for child in self.children)])


class Document(Element):
    """The page; raises on tags that do not match."""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Document("", {}, None)
        self._open: list[Element] = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"an attribute of {tag} stands twice"
        element = Element(tag, {name: value or "" for name, value in attrs}, self._open[-1])
        self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].name == tag, f"</{tag}> ends <{self._open[-1].name}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].texts.append(data)

    def close(self) -> None:
        super().close()
        assert len(self._open) == 1, f"<{self._open[-1].name}> is not ended"


def read_page(text: str) -> Document:
    """The page as a tree. Raises `AssertionError` for one that is not well formed."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return reader.root


def rows_of(document: Element) -> list[Element]:
    """The rows of the table of items."""
    (table,) = [table for table in document.all("table") if "data-sortable" in table.attributes]
    return [row for row in table.all("tr") if "data-rank" in row.attributes]
