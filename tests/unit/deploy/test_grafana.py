"""deploy/grafana: Grafana's own types take the dashboard without a rest, and its queries are PromQL over
metrics that exist."""

from __future__ import annotations

import configparser
import json
import re
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.cog.runtime import UnknownDataquery
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel, RowPanel

from tests.support.deploy_kit import DEPLOY, ROOT, faults
from tests.unit.deploy.test_prometheus_rules import known

BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/nightjar.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def filled(expression: str) -> str:
    """A query with Grafana's variables replaced as Grafana does."""
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", "1m"))


def opened(board: dict[str, Any]) -> Dashboard:
    register_default_plugins()
    return Dashboard.from_json(board)


def test_grafanas_types_hold_every_field_of_the_dashboard() -> None:
    board = opened(BOARD)
    assert json.loads(json.dumps(board, cls=JSONEncoder)) == BOARD
    panels = board.panels or []
    assert [type(panel) for panel in panels if not isinstance(panel, Panel | RowPanel)] == []
    assert not any(
        isinstance(target, UnknownDataquery)
        for panel in panels
        if isinstance(panel, Panel)
        for target in panel.targets or []
    )


def test_a_field_that_grafana_does_not_know_is_seen() -> None:
    board = json.loads(json.dumps(BOARD))
    board["panels"][1]["targets"][0]["legend"] = "x"
    assert json.loads(json.dumps(opened(board), cls=JSONEncoder)) != board


def test_every_query_is_about_metrics_that_exist() -> None:
    metrics = known()
    assert [
        (title, found) for title, expression in QUERIES if (found := faults(filled(expression), metrics))
    ] == []
    assert len(QUERIES) > 30


def test_every_variable_is_defined_and_every_panel_says_what_it_shows() -> None:
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    used = {name for _, expression in QUERIES for name in re.findall(r"\$(\w+)", expression)} - {
        "__rate_interval"
    }
    assert used == variables - {"datasource"} == {"worker", "server"}
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            (expression,) = re.findall(r"label_values\((.*), instance\)", variable["query"])
            assert faults(expression, known()) == []
    assert all(
        panel["title"] and panel["description"] and "unit" in panel["fieldConfig"]["defaults"]
        for panel in PANELS
    )
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert grid["x"] + grid["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_compose_gives_grafana_its_files() -> None:
    grafana = SERVICES["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert all((ROOT / source).exists() for source in mounts)
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/nightjar.yml").read_text())[
        "providers"
    ]
    place = f"{provider['options']['path']}/nightjar.json"
    assert mounts["./deploy/grafana/nightjar.json"] == place
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in SERVICES
    settings = configparser.ConfigParser()
    settings.read(DEPLOY / "grafana/grafana.ini")
    assert settings["dashboards"]["default_home_dashboard_path"] == place
    # Nobody logs in, so nobody may do more than look, and only this host reaches it.
    assert settings["auth.anonymous"]["org_role"] == "Viewer"
    assert grafana["ports"] == ["127.0.0.1:3000:3000"]
