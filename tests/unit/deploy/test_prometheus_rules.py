"""deploy/prometheus: every query is PromQL over metrics and labels that workers and servers export, and
every alert has its runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.support.deploy_kit import DEPLOY, ROOT, exported, faults, grouped_by

CONFIG: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
FILES = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((DEPLOY / "prometheus/rules").glob("*.yml"))
}
RULES: list[dict[str, Any]] = [rule for group in FILES["nightjar"]["groups"] for rule in group["rules"]]
ALERTS: list[dict[str, Any]] = [
    rule for file in FILES.values() for group in file["groups"] for rule in group["rules"] if "alert" in rule
]
TESTS = Path(__file__).with_name("rules_test.yml")


def known() -> dict[str, set[str]]:
    """Metrics with their labels: exported ones, and those that rules record."""
    records = {
        rule["record"]: grouped_by(promql_parser.parse(rule["expr"])) - {"le"}
        for rule in RULES
        if "record" in rule
    }
    return exported() | records


def test_rules_name_metrics_that_exist() -> None:
    metrics = known()
    assert {
        rule.get("record", rule.get("alert")): found
        for rule in RULES
        if (found := faults(rule["expr"], metrics))
    } == {}
    assert len(RULES) > 20


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("speech_item_total", "no metric speech_item_total"),
        ('speech_items_total{state="failed"}', "speech_items_total has no label state"),
        ('speech_items_total{outcome="error"}', "outcome is never error"),
        ("sum by (model) (speech_items_total)", "no label model to group by"),
        ("speech_queue_depth > on (code) speech_leases_held", "no label code to group by"),
    ],
)
def test_a_query_of_what_is_not_there_is_seen(expression: str, fault: str) -> None:
    assert faults(expression, known()) == [fault]


def test_queries_of_hosts_are_promql() -> None:
    metrics = {
        name: {"fstype", "mountpoint", "instance"}
        for name in ("node_filesystem_avail_bytes", "node_filesystem_size_bytes")
    }
    assert [
        found
        for group in FILES["host"]["groups"]
        for rule in group["rules"]
        if (found := faults(rule["expr"], metrics))
    ] == []


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    headings = re.findall(r"(?m)^## (Nightjar\w+)$", (ROOT / "docs/alerts.md").read_text())
    assert sorted(headings) == sorted(alert["alert"] for alert in ALERTS)
    for alert in ALERTS:
        assert alert["annotations"]["runbook"] == f"docs/alerts.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert alert["annotations"]["summary"]


def test_prometheus_loads_the_rules_and_scrapes_the_services_of_compose() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services, monitor = compose["services"], compose["services"]["prometheus"]
    assert CONFIG["rule_files"] == ["rules/*.yml"]
    assert "./deploy/prometheus:/etc/prometheus:ro" in monitor["volumes"]
    assert "--config.file=/etc/prometheus/prometheus.yml" in monitor["command"]
    worker, server = CONFIG["scrape_configs"]
    first = int(services["worker-gpu"]["environment"]["SPEECH_WORKER__METRICS_PORT"])
    ports = [target["port"] for target in worker["dns_sd_configs"]]
    assert ports == list(range(first, first + 8)), "one for each GPU of a host"
    assert {name for target in worker["dns_sd_configs"] for name in target["names"]} == {
        name for name in services if "worker-" in name
    }
    assert [(target["names"], target["port"]) for target in server["dns_sd_configs"]] == [(["serve"], 8000)]
    (key,) = [config for config in monitor["configs"] if config["source"] == "serve-key"]
    assert key["target"] == server["authorization"]["credentials_file"]
    assert "${SERVE_API_KEY" in compose["configs"]["serve-key"]["content"]


def test_alerts_fire_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool")
    done = subprocess.run(
        [promtool, "test", "rules", TESTS.name], cwd=TESTS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checked = subprocess.run(
        [promtool, "check", "config", "--syntax-only", DEPLOY / "prometheus/prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
