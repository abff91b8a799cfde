"""Rules of jobs that nothing shows until a number is wrong: reopened items, digests and folders of
exports, the price of a dry run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from jobs.cli import cli
from jobs.export.items import WHOLE, exported, make_plan
from jobs.ledger import Ledger
from jobs.ledger.records import ItemRow
from jobs.settings import Settings
from tests.support.ledger_kit import done, expire, failed, lease_next, rows, submit


def ledger_of(folder: Path) -> Ledger:
    ledger = Ledger(f"sqlite:///{folder}/ledger.sqlite")
    ledger.migrate()
    return ledger


def test_items_that_are_opened_again_under_a_lease_hide_nothing_that_it_has_ended(tmp_path: Path) -> None:
    """An earlier lease left a failed item; this one has ended another when a person opens the first again,
    and dies."""
    ledger = ledger_of(tmp_path)
    job = submit(ledger, (4,))
    first = lease_next(ledger)
    ledger.commit(first.ticket, [failed(0)])
    assert ledger.release(first.ticket, "drain")
    expire(ledger, lease_next(ledger))
    ledger.reconcile()
    last = lease_next(ledger)
    ledger.commit(last.ticket, [done(1)])
    assert ledger.retry(job.id, None) == 1
    expire(ledger, last)
    ledger.reconcile()
    assert rows(ledger, "SELECT attempts FROM shards") == [(1,)], (
        "what a lease has ended starts the count of attempts anew"
    )
    assert rows(ledger, "SELECT n_ok, n_failed FROM attempts ORDER BY epoch") == [(0, 1), (0, 0), (1, 0)]
    ledger.close()


def test_the_digest_of_an_export_is_that_of_its_items_and_their_audio(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    job = submit(ledger, (2,))
    ledger.commit(lease_next(ledger).ticket, [done(0), done(1)])
    plain = list(ledger.items(job.id))
    ledger.close()

    def digest(*changed: ItemRow) -> str:
        return make_plan(exported([*changed, *plain[len(changed) :]]), WHOLE, None).digest

    artifact = plain[0].artifact
    assert artifact is not None
    others = [
        msgspec.structs.replace(plain[0], artifact=msgspec.structs.replace(artifact, sha256="other")),
        msgspec.structs.replace(plain[0], example_id="other"),
        msgspec.structs.replace(plain[0], artifact=None),
    ]
    assert digest() == digest(plain[0])
    assert len({digest(), *(digest(other) for other in others)}) == 4


def test_an_export_with_another_filter_has_a_folder_of_its_own(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    asked = [
        ("job", "parquet", None),
        ("job", "parquet", "wer < 0.1"),
        ("job", "parquet", "wer < 0.2"),
        ("job", "lhotse", None),
    ]
    folders = [settings.export_folder(*one) for one in [*asked, ("other", "parquet", None)]]
    assert len(set(folders)) == 5
    assert settings.export_folder(*asked[1]) == folders[1]
    assert folders[0] == tmp_path / "exports" / "job" / "parquet"


def test_a_dry_run_costs_the_hours_of_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPEECH_HOME", str(tmp_path / "home"))
    line = (
        '{"example_id": "%d", "messages": [["user", "text", "Good evening, and good night to you all."]]}\n'
    )
    Path("in.jsonl").write_text("".join(line % number for number in range(200)))
    found = {}
    for price in ("", "7200"):
        monkeypatch.setenv("SPEECH_PRICE_PER_GPU_HOUR", price) if price else None
        found[price] = json.loads(
            CliRunner().invoke(cli, ["submit", "in.jsonl", "--dry-run", "--json"]).stdout
        )
        text = CliRunner().invoke(cli, ["submit", "in.jsonl", "--dry-run"]).stdout
        cost = re.search(r"(?m)^cost +(.*)$", text)
        assert cost.group(1) == str(found[price]["cost"]) if price and cost else (cost is None and not price)
    assert found[""]["cost"] is None
    assert found["7200"]["engine_seconds"] > 1
    assert found["7200"]["cost"] == pytest.approx(2 * found["7200"]["engine_seconds"])
