"""The files of deploy/: their environment variables, their queries, and the metrics that workers and
servers really export."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import promql_parser
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jobs.cli.admin import described
from jobs.settings import NOT_SETTINGS
from pipelines.errors import ErrorCode, ServiceError
from pipelines.registry import describe
from pipelines.serving import ServeOptions
from pipelines.serving.metrics import MetricsPage, ServerMetrics
from pipelines.serving.model import ServedModel
from tests.support.docs_kit import check_call
from tests.support.fakes import FakePipeline
from worker.cli import cli as worker_cli
from worker.metrics import Metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
#: Labels that Prometheus itself adds to what it scrapes, and metrics that it makes itself.
OF_A_TARGET = {"job", "instance"}
OF_PROMETHEUS = {"up": OF_A_TARGET, "ALERTS": {"alertname", "alertstate", "severity"}}
#: Labels with a closed list of values.
VALUES = {
    "job": {"nightjar-worker", "nightjar-server"},
    "outcome": {"done", "failed"},
    "code": {"", *(code.value for code in ErrorCode)},
}


def unknown_settings(names: Iterable[str]) -> list[str]:
    """The variables with our prefix that are no setting."""
    known = {variable for variable, _, _ in described()} | NOT_SETTINGS
    return [name for name in names if name.startswith("SPEECH_") and name not in known]


def worker_page() -> str:
    """What a worker's port of metrics says, once everything happened that it counts."""
    metrics, pipeline = Metrics(), FakePipeline()
    metrics.watch(lambda: 1, lambda: [pipeline])
    metrics.items.labels(outcome="done", code="").inc()
    metrics.refused_draws.labels(code="qa.silence").inc()
    metrics.shards.labels(outcome="done").inc()
    metrics.reconciled.labels(what="expired").inc()
    metrics.count_retry(ServiceError(ErrorCode.STORE_FULL, "The store is full."))
    return generate_latest(metrics.registry).decode()


def server_page() -> str:
    """What `/metrics` of a server says, once everything happened that it counts."""
    pipeline = FakePipeline()
    model = ServedModel(describe("hibari"), lambda: pipeline, ServeOptions(("hibari",), slots=1))
    model.pipeline = pipeline
    page = MetricsPage()
    metrics = ServerMetrics(model, page)
    metrics.first_audio(metrics.answered("/v1/audio/speech", 200, 0.1), 0.1)
    model.admission.admitted(0.1)
    model.on_underrun(0.1)
    return page.text().decode()


def labels_of(page: str) -> dict[str, set[str]]:
    """The labels of each metric on a page, with those that Prometheus adds."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set(OF_A_TARGET)).update(sample.labels)
    return found


def exported() -> dict[str, set[str]]:
    """The labels of every metric of workers and servers, and of what Prometheus makes itself."""
    worker, server = labels_of(worker_page()), labels_of(server_page())
    return {
        name: worker.get(name, set()) | server.get(name, set()) for name in worker | server
    } | OF_PROMETHEUS


def faults(expression: str, known: Mapping[str, set[str]]) -> list[str]:
    """What a query names that is not in `known`: metrics, labels, and values of labels whose values are a
    closed list. Raises `ValueError` for what is no PromQL."""
    found: list[str] = []
    labels: set[str] = set()

    def look(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            name = node.name or ""
            if name not in known:
                found.append(f"no metric {name}")
                return True
            labels.update(known[name])
            for matcher in node.matchers.matchers:
                if matcher.name not in known[name]:
                    found.append(f"{name} has no label {matcher.name}")
                elif matcher.op == promql_parser.MatchOp.Equal and matcher.value not in VALUES.get(
                    matcher.name, {matcher.value}
                ):
                    found.append(f"{matcher.name} is never {matcher.value}")
        return True

    tree = promql_parser.parse(expression)
    promql_parser.walk(tree, pre_visit=look)
    return found + [
        f"no label {name} to group by" for name in grouped_by(tree) if not found and name not in labels
    ]


def grouped_by(tree: Any) -> set[str]:
    """The labels that the aggregations of a query keep, and those that its operators match on."""
    found: set[str] = set()

    def look(node: Any) -> bool:
        modifier = getattr(node, "modifier", None)
        if isinstance(node, promql_parser.BinaryExpr) and modifier is not None:
            modifier = modifier.matching
        found.update(getattr(modifier, "labels", None) or ())
        return True

    promql_parser.walk(tree, pre_visit=look)
    return found


def check_command(words: list[str]) -> None:
    """Holds the words after `nightjar` against the commands as they are. Raises `click.UsageError`."""
    name, *rest = words
    consumer = {"worker": "run"}.get(name, name)
    if consumer in worker_cli.commands:
        command: click.Command = worker_cli.commands[consumer]
        command.make_parser(click.Context(command)).parse_args(rest)
    else:
        check_call(shlex.join(["nightjar", *words]))
