"""The page of a report: what it says of a job, and that nothing in it can do anything but show it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
import soundfile
from click.testing import CliRunner
from pydantic import SecretStr

from jobs.checks import PRESETS
from jobs.cli import cli
from jobs.cli.results import report
from jobs.ingest import SubmitOptions, submit
from jobs.ledger import Ledger
from jobs.ledger.records import JobSpec
from jobs.progress import Progress
from jobs.report import SHOWN_ITEMS, default_place, sample
from jobs.settings import S3Settings
from jobs.store import open_store
from pipelines.errors import ConfigError, StoreError
from pipelines.registry import register_pipeline
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.ledger_kit import execute
from tests.support.report_kit import HOSTILE, Desk, Document, open_desk, read_page, rows_of
from tests.support.services import MotoS3
from tests.support.worker_rig import WORKER

TEXTS = ["a" * (10 + 7 * n % 60) for n in range(40)]
MIXED = [*TEXTS, "[[fail:synth.no_eos]]", "[[fail:synth.nan]]", "[[fail:synth.nan]] b", "x" * 500]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with open_desk(tmp_path) as desk:
        yield desk


def facts(document: Document) -> dict[str, str]:
    """Name -> value of the overview."""
    (overview,) = document.all("dl", class_="facts")
    return {name.text: value.text for name, value in zip(overview.all("dt"), overview.all("strong"))}


def test_the_overview_says_what_status_says(desk: Desk) -> None:
    document, result = desk.report(desk.job(MIXED, bad_lines=2), price_per_gpu_hour=36.0)
    shown = facts(document)
    assert (shown["Items done"], shown["Items failed"], shown["Lines refused"]) == ("41", "3", "2")
    assert {"Audio", "RTFx", "Throughput", "Time", "Engine time", "Cost"} <= shown.keys()
    assert "GPU" not in document.whole_text()
    assert (result.shown, result.measured) == (44, 41)
    assert facts(desk.report(desk.rig.ledger.jobs()[0])[0])["Cost"] == "unknown"
    assert "Energy" not in shown
    execute(desk.rig.ledger, "UPDATE shards SET energy_mj = 2000, audio_ms = 10000")
    document = desk.report(desk.rig.ledger.jobs()[0])[0]
    assert float(facts(document)["Energy"].removesuffix(" J")) >= 20
    assert "of the GPUs, 0.200 J per audio-second" in document.whole_text()


def header_of(document: Document) -> tuple[str, list[str]]:
    """The heading, and what was made of what."""
    (header,) = document.all("header")
    return header.all("h1")[0].text, [name.text for name in header.all("bdi")]


def test_the_header_says_input_model_and_voice(desk: Desk) -> None:
    # The model's only voice; then one of two that the lines ask for, and neither.
    assert header_of(desk.report(desk.job(TEXTS[:3]))[0]) == ("in.jsonl", ["in.jsonl", "fake", "sine"])
    card = fake_card()
    card = replace(card, capabilities=replace(card.capabilities, voices=("anna", "ben")))
    forget = register_pipeline("fake", card, FakePipeline)
    try:
        assert header_of(desk.report(desk.job(TEXTS[:2], generation={"voice": "ben"}))[0])[1][2] == "ben"
        assert header_of(desk.report(desk.job(TEXTS[:4]))[0])[1][2] == "the model's own"
    finally:
        forget()
        register_pipeline("fake", fake_card(), FakePipeline)


def test_the_report_of_a_run_shows_as_many_items_as_the_command(desk: Desk) -> None:
    from jobs import local_run

    job = desk.job(TEXTS)
    status = desk.rig.ledger.status(job.id)
    with Progress(quiet=True) as progress:
        assert local_run._report(desk.rig.ledger, desk.rig.store, status, desk.rig.settings, progress)  # pyright: ignore[reportPrivateUsage]
    assert len(rows_of(read_page(default_place(desk.rig.settings, job.id).read_text()))) == len(TEXTS)
    option = next(option for option in report.params if option.name == "items")
    assert option.default == SHOWN_ITEMS


def test_a_gap_before_a_retry_is_no_time_of_work(desk: Desk) -> None:
    job = desk.job([*TEXTS[:30], "[[fail_once:synth.no_eos]]"])
    execute(desk.rig.ledger, "UPDATE attempts SET started_at = started_at - 7200, ended_at = ended_at - 7200")
    execute(
        desk.rig.ledger, "UPDATE jobs SET started_at = started_at - 7200, finished_at = finished_at - 7200"
    )
    assert desk.rig.ledger.retry(job.id, None) == 1
    desk.rig.run_next()
    document, _ = desk.report(job)
    (overview,) = document.all("dl", class_="facts")
    said = " ".join(overview.whole_text().split())
    assert "of work, 2 h 0 min from the first claim" in said
    busy = desk.rig.status(job).busy_seconds
    assert busy is not None
    assert busy < 600
    # The charts end with the work: their last time is far from two hours.
    assert "2 h" not in " ".join(figure.whole_text() for figure in document.all("figure"))


def test_errors_are_counted_and_explained(desk: Desk) -> None:
    document, _ = desk.report(desk.job(MIXED, bad_lines=2))
    rows = [row for row in document.all("tr") if row.all("td", class_="share")]
    assert [(row.all("code")[0].text, row.all("td", class_="number")[0].text) for row in rows] == [
        ("input.bad_json", "2"),
        ("synth.nan", "2"),
        ("synth.no_eos", "1"),
    ]
    assert "line 45" in rows[0].all("td", class_="words")[0].text


def test_the_worst_items_come_first(desk: Desk) -> None:
    document, _ = desk.report(desk.job(MIXED), items=12)
    rows = rows_of(document)
    assert [row.attributes["data-rank"] for row in rows] == [str(rank) for rank in range(1, 13)]
    states = [row.attributes["class"] for row in rows]
    assert states == ["failed"] * 3 + ["done"] * 9
    # Half of the failed ones' room is for each code.
    assert {row.all("td", class_="result")[0].attributes["data-value"] for row in rows[:3]} == {
        "synth.nan",
        "synth.no_eos",
    }
    # The long text of a few units more than its 500th has a pace of its own.
    assert any("pace" in row.all("td", class_="result")[0].whole_text() for row in rows[3:])


def test_scores_and_draws_of_the_checks_are_shown(desk: Desk) -> None:
    job = desk.job([*TEXTS[:8], "[[silent]]"], quality=PRESETS["basic"])
    document, _ = desk.report(job)
    (table,) = [table for table in document.all("table") if "data-sortable" in table.attributes]
    headings = [button.whole_text().strip() for button in table.all("button")]
    assert {"silence", "clipped", "ended"} <= set(headings)
    assert any(caption.text.startswith("Score: ") for caption in document.all("figcaption"))


def test_hostile_texts_stay_texts(desk: Desk) -> None:
    document, _ = desk.report(desk.job([HOSTILE, HOSTILE + "[[fail:synth.nan]]"]))
    assert len(document.all("script")) == 1
    assert not document.all("img")
    texts = [cell.text for cell in document.all("td", class_="words")]
    assert any(text.startswith("</script></td></table><script>") and "{{ 7*7 }}" in text for text in texts)
    assert not any("\u202e" in text or "\x07" in text for text in texts)
    for element in document.all():
        assert not [name for name in element.attributes if name.startswith("on") or name == "style"], (
            element.name
        )


def test_the_policy_allows_what_is_in_the_page_and_nothing_else(desk: Desk) -> None:
    document, _ = desk.report(desk.job(TEXTS[:4]))
    (policy,) = document.all("meta", **{"http-equiv": "Content-Security-Policy"})
    rules = dict(rule.strip().split(" ", 1) for rule in policy.attributes["content"].split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for name in ("script", "style"):
        (element,) = document.all(name)
        digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        assert rules[f"{name}-src"] == f"'sha256-{digest}'"
    for element in document.all():
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            address = element.attributes.get(name, "#")
            assert address.startswith(("#", "jobs/")), address


def test_the_page_is_open_to_keyboards_and_screen_readers(desk: Desk) -> None:
    document, _ = desk.report(desk.job(MIXED))
    ids = [element.attributes["id"] for element in document.all() if "id" in element.attributes]
    assert len(set(ids)) == len(ids)
    for element in document.all():
        for name in ("aria-labelledby", "aria-describedby", "data-sortable"):
            assert set(element.attributes.get(name, "").split()) <= set(ids), element.attributes
        if element.attributes.get("role") == "img":
            assert element.attributes.keys() & {"aria-label", "aria-labelledby"}
    assert document.all("html")[0].attributes["lang"] == "en"
    assert document.all("title")[0].text
    assert [int(heading.name[1]) for heading in document.all() if heading.name in ("h1", "h2", "h3")][:2] == [
        1,
        2,
    ]
    skip = document.all("a", class_="skip")[0]
    assert skip.attributes["href"].removeprefix("#") in ids
    assert all(player.attributes["aria-label"] for player in document.all("audio"))
    for table in document.all("table"):
        assert all(heading.attributes.get("scope") in ("col", "row") for heading in table.all("th"))
    (items,) = [table for table in document.all("table") if "data-sortable" in table.attributes]
    sortable = [heading for heading in items.all("th") if heading.all("button")]
    assert {heading.attributes["aria-sort"] for heading in sortable} == {"ascending", "none"}
    assert all(heading.all("button", type="button") for heading in sortable)
    assert all(
        len(row.all("td")) + len(row.all("th")) == len(items.all("th", scope="col"))
        for row in rows_of(document)
    )


@pytest.mark.parametrize(
    ("uri", "name", "title", "source"),
    [
        ("/data/night.jsonl", "", "night.jsonl", "Input night.jsonl,"),
        ("-", "", "Job {id}", "Input standard input,"),
        ("/out/.nightjar/inputs/5f70bf18a0860070.jsonl", "", "Job {id}", "Input records of a program,"),
        ("/out/.nightjar/inputs/5f70bf18a0860070.jsonl", "evening", "evening", "Input records of a program,"),
    ],
)
def test_the_title_is_a_name_and_no_hash(desk: Desk, uri: str, name: str, title: str, source: str) -> None:
    job = desk.job(["hello"])
    execute(desk.rig.ledger, "UPDATE jobs SET input_uri = :uri, name = :name", uri=uri, name=name)
    document, _ = desk.report(job)
    shown = title.format(id=job.id)
    assert (document.all("h1")[0].text, document.all("title")[0].text) == (shown, f"{shown}: report")
    header = " ".join(document.all("header")[0].whole_text().split())
    assert all(word in header for word in source.rstrip(",").split()[1:])


def test_players_find_the_files_from_where_the_page_is(desk: Desk, tmp_path: Path) -> None:
    job = desk.job(TEXTS[:5])
    for place in (tmp_path / "report.html", tmp_path / "a b#" / "deep" / "report.html"):
        document, _ = desk.report(job, place)
        players = document.all("audio")
        assert len(players) == 5
        for player in players:
            with soundfile.SoundFile(place.parent / unquote(player.attributes["src"])) as file:
                assert file.frames > 0


def test_embedded_clips_are_short_and_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "CLIP_SECONDS", 0.2)
    job = desk.job([*TEXTS[:5], "a" * 400])
    document, _ = desk.report(job, embed=True)
    for player in document.all("audio"):
        kind, _, data = player.attributes["src"].partition(",")
        assert kind == "data:audio/flac;base64"
        samples, rate = soundfile.read(io.BytesIO(base64.b64decode(data)))
        assert 0 < len(samples) <= 0.2 * rate
    assert "the first 0.2 s" in document.whole_text()
    monkeypatch.setattr(sample, "MAX_EMBEDDED_BYTES", 3000)
    document, result = desk.report(job, embed=True)
    assert len(document.all("audio")) < 6
    assert "not embedded, because the page would be too large" in document.whole_text()
    assert result.shown == 6


def test_audio_that_is_gone_or_broken_costs_only_its_player(desk: Desk) -> None:
    job = desk.job(TEXTS[:3])
    first, second, _ = sorted((desk.rig.folder / "jobs" / job.id / "audio").rglob("*.wav"))
    first.unlink()
    second.write_bytes(b"RIFF no audio")
    document, _ = desk.report(job)
    assert len(document.all("audio")) == 1
    assert "cannot be read: store.missing" in document.whole_text()
    assert "cannot be read: input.audio_unreadable" in document.whole_text()


def test_a_finished_job_has_one_report(desk: Desk) -> None:
    job = desk.job(MIXED)
    places = [desk.rig.folder / name for name in ("one.html", "two.html")]
    for place in places:
        desk.report(job, place)
    assert places[0].read_bytes() == places[1].read_bytes()


def test_a_job_that_waits_or_runs_has_a_report_too(desk: Desk) -> None:
    waiting = desk.job(TEXTS[:8], run=False)
    document, result = desk.report(waiting)
    assert (result.shown, facts(document)["Time"]) == (0, "not started")
    desk.rig.run_next()
    document, result = desk.report(desk.rig.ledger.job(waiting.id))
    assert result.shown == 4
    assert "Time left" in facts(document)
    assert "Not drawn: 1 lease of shards so far" in document.whole_text()


def test_speed_is_drawn_over_the_time_at_work(desk: Desk) -> None:
    document, _ = desk.report(desk.job(TEXTS))
    figures = {figure.all("figcaption")[0].text.strip(): figure for figure in document.all("figure")}
    for name in ("Throughput", "RTFx"):
        bars = figures[name].all("rect", class_="bar")
        assert bars
        assert len(bars) == len(figures[name].all("td")) / 2


def test_a_large_job_is_looked_at_in_blocks(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "MAX_MEASURED", 20)
    monkeypatch.setattr(sample, "BLOCKS", 5)
    document, result = desk.report(desk.job(TEXTS), items=6)
    assert (result.measured, result.shown) == (20, 6)
    assert "in blocks taken evenly from 40 items" in document.whole_text()


def test_an_input_that_is_away_ends_the_report_and_leaves_no_file(desk: Desk, tmp_path: Path) -> None:
    job = desk.job(TEXTS[:4])
    for path in (tmp_path / "jobs" / job.id / "input").iterdir():
        path.unlink()
    with pytest.raises(StoreError):
        desk.report(job)
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigError):
        desk.report(desk.job(TEXTS[:2]), tmp_path / "folder.html")


def test_the_audio_of_a_bucket_is_in_the_page(desk: Desk, moto: MotoS3) -> None:
    settings = S3Settings(
        endpoint_url=moto.endpoint,
        region=moto.region,
        access_key_id=moto.access_key,
        secret_access_key=SecretStr(moto.secret_key),
        addressing_style="path",
    )
    bucket = moto.create_bucket("test-report")
    desk.rig.store = open_store(f"s3://{bucket}/out", settings)  # pyright: ignore[reportAttributeAccessIssue]
    document, _ = desk.report(desk.job(TEXTS[:3]))
    assert [player.attributes["src"][:16] for player in document.all("audio")] == ["data:audio/flac;"] * 3


def test_a_ledger_on_postgresql_has_the_same_report(desk: Desk, postgres_url: str) -> None:
    on_sqlite, _ = desk.report(desk.job(MIXED, quality=PRESETS["basic"]))
    rig = desk.rig
    rig.ledger.close()
    rig.ledger = Ledger(postgres_url)
    rig.ledger.migrate()
    rig.ledger.register_worker(WORKER)
    rig.runner = rig.runner_on(rig.ledger)
    on_postgresql, _ = desk.report(desk.job(MIXED, quality=PRESETS["basic"]))
    for document in (on_sqlite, on_postgresql):
        assert {"Throughput", "RTFx"} <= {
            caption.text.split(" (")[0].strip() for caption in document.all("figcaption")
        }
    first, second = (
        [row.all("td", class_="result")[0].whole_text().split() for row in rows_of(page)]
        for page in (on_sqlite, on_postgresql)
    )
    assert first == second


def test_the_command_writes_it_into_the_home(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job = desk.job(TEXTS[:4])
    done = CliRunner().invoke(
        cli, ["report", job.id[:12], "--home", str(tmp_path), "--price", "0.02", "--items", "3", "--json"]
    )
    assert done.exit_code == 0, done.output
    view = json.loads(done.stdout)
    place = tmp_path / "reports" / f"{job.id}.html"
    assert view == {
        "schema": "nightjar.report/1",
        "job": job.id,
        "to": str(place),
        "bytes": place.stat().st_size,
        "items": 3,
        "measured": 4,
    }
    assert facts(read_page(place.read_text()))["Cost"] == "0.00"
    assert (
        CliRunner().invoke(cli, ["report", job.id, "--home", str(tmp_path), "--items", "501"]).exit_code == 2
    )


def test_signs_that_turn_text_round_are_shown_and_do_nothing(desk: Desk) -> None:
    signs = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    name = f"night{signs} {HOSTILE}"
    path = desk.rig.folder / "in.jsonl"
    ids = [f"{sign}example{number}" for number, sign in enumerate(signs)]
    texts = [f"good {sign} night" for sign in signs[:-1]] + ["[[fail:synth.nan]]" + signs]
    path.write_text(
        "".join(
            json.dumps({"example_id": one, "messages": [["user", "text", text]]}) + "\n"
            for one, text in zip(ids, texts)
        )
    )
    options = SubmitOptions(name=name)
    job = submit(
        desk.rig.settings, desk.rig.ledger, desk.rig.store, str(path), JobSpec(model="fake"), options=options
    ).job
    while not desk.rig.ledger.job(job.id).state.final:
        desk.rig.run_next()
    document, _ = desk.report(job)
    page = (desk.rig.folder / "report.html").read_text()
    assert not [sign for sign in signs if sign in page]
    heading, title = document.all("h1")[0].text, document.all("title")[0].text
    assert heading.startswith("night\\u200e\\u200f\\u202a")
    assert heading in title
    shown = [row.all("bdi", class_="id")[0].text for row in rows_of(document)]
    assert sorted(shown) == sorted(ascii(one)[1:-1] for one in ids)
    assert len(document.all("script")) == 1


def test_names_are_kept_apart_from_the_text_around_them(desk: Desk) -> None:
    document, _ = desk.report(desk.job([*TEXTS[:8], "[[silent]]"], quality=PRESETS["basic"]))
    (items,) = [table for table in document.all("table") if "data-sortable" in table.attributes]
    assert {"silence", "ended"} <= {
        button.all("bdi")[0].text for button in items.all("button") if button.all("bdi")
    }
    assert [one.text for one in document.all("header")[0].all("bdi")] == ["in.jsonl", "fake", "sine"]
