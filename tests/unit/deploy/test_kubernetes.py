"""deploy/kubernetes: manifests that follow Kubernetes' schemas, and agree with the settings, the image,
compose and the server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from jobs.settings import ServeSettings, WorkerSettings
from pipelines.serving import middleware, model
from tests.support.deploy_kit import DEPLOY, ROOT, check_command, unknown_settings
from worker.runtime import EXIT_SECONDS

FOLDER = DEPLOY / "kubernetes"
LISTS = sorted(FOLDER.rglob("kustomization.yaml"))
FILES = sorted(path for path in FOLDER.rglob("*.yaml") if path not in LISTS)
DOCUMENTS: dict[str, dict[str, Any]] = {
    f"{document['kind']}/{document['metadata']['name']}": document
    for path in FILES
    for document in yaml.safe_load_all(path.read_text())
}
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
WORKERS = (
    "Deployment/nightjar-worker-cpu",
    "Deployment/nightjar-worker-gpu",
    "Deployment/nightjar-worker-vllm",
)
SERVE = "Deployment/nightjar-serve"
ON_GPUS = (*WORKERS[1:], SERVE)


def pod_of(document: dict[str, Any]) -> dict[str, Any] | None:
    spec = document.get("spec", {})
    spec = spec.get("jobTemplate", {}).get("spec", spec)
    return spec.get("template", {}).get("spec")


PODS = {name: pod for name, document in DOCUMENTS.items() if (pod := pod_of(document)) is not None}


def container(name: str) -> dict[str, Any]:
    (one,) = PODS[name]["containers"]
    return one


def environment(name: str) -> dict[str, str]:
    """What the container of a workload finds in its environment."""
    found: dict[str, str] = {}
    for source in container(name)["envFrom"]:
        ((kind, reference),) = source.items()
        document = DOCUMENTS[f"{'ConfigMap' if kind == 'configMapRef' else 'Secret'}/{reference['name']}"]
        found |= document.get("data", {}) | document.get("stringData", {})
    return found | {one["name"]: one["value"] for one in container(name)["env"]}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_manifest_follows_the_schema_of_kubernetes(name: str) -> None:
    kubernetes_validate.validate(DOCUMENTS[name], kubernetes_validate.latest_version(), strict=True)


def test_a_wrong_manifest_is_seen() -> None:
    broken = DOCUMENTS[SERVE] | {"spec": DOCUMENTS[SERVE]["spec"] | {"replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


def test_every_manifest_is_in_a_kustomization_and_every_resource_exists() -> None:
    named: set[Path] = set()
    for path in LISTS:
        for resource in yaml.safe_load(path.read_text())["resources"]:
            target = path.parent / resource
            assert target.exists(), f"{path}: {resource}"
            named |= {target} if target.is_file() else set()
    assert set(FILES) - named == {FOLDER / "secret.example.yaml"}, "which is applied once, filled in"


@pytest.mark.parametrize("name", PODS)
def test_commands_variables_and_what_is_referred_to_exist(name: str) -> None:
    check_command(container(name)["args"])
    assert unknown_settings(environment(name)) == []
    for volume in PODS[name]["volumes"]:
        if (claim := volume.get("persistentVolumeClaim")) is not None:
            assert f"PersistentVolumeClaim/{claim['claimName']}" in DOCUMENTS
        if (config := volume.get("configMap")) is not None:
            assert f"ConfigMap/{config['name']}" in DOCUMENTS
    assert {mount["name"] for mount in container(name)["volumeMounts"]} == {
        volume["name"] for volume in PODS[name]["volumes"]
    }


@pytest.mark.parametrize("name", PODS)
def test_images_are_those_of_compose_and_run_as_the_user_of_the_dockerfile(name: str) -> None:
    recipes = {one["image"]: one["build"] for one in COMPOSE["services"].values() if "build" in one}
    assert container(name)["image"] in recipes
    security, own = PODS[name]["securityContext"], container(name)["securityContext"]
    (user,) = re.findall(r"useradd --uid (\d+)", DOCKERFILE)
    assert (security["runAsNonRoot"], security["runAsUser"], security["fsGroup"]) == (
        True,
        int(user),
        int(user),
    )
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
    # All that is written lies in volumes: the working directory, home, temporary files, caches.
    mounts = {mount["mountPath"] for mount in container(name)["volumeMounts"]}
    assert {"/data", "/tmp"} <= mounts
    assert "WORKDIR /data" in DOCKERFILE
    assert environment(name)["HOME"] == "/data"
    if "/cache" in mounts:
        assert "XDG_CACHE_HOME=/cache TRITON_CACHE_DIR=/cache/" in DOCKERFILE


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_may_drain_and_is_alive_while_its_port_answers(name: str) -> None:
    drain = float(environment(name)["SPEECH_WORKER__DRAIN_SECONDS"])
    assert drain == WorkerSettings().drain_seconds
    assert PODS[name]["terminationGracePeriodSeconds"] > drain + EXIT_SECONDS
    port = int(environment(name)["SPEECH_WORKER__METRICS_PORT"])
    assert container(name)["ports"] == [{"name": "metrics", "containerPort": port}]
    assert environment(name)["SPEECH_WORKER__METRICS_ADDRESS"] == "0.0.0.0"
    for probe in ("startupProbe", "livenessProbe"):
        assert container(name)[probe]["httpGet"] == {"path": "/metrics", "port": "metrics"}


def test_the_server_gets_requests_when_it_is_prepared_and_drains() -> None:
    serve, variables = container(SERVE), environment(SERVE)
    assert int(variables["SPEECH_SERVE__PORT"]) == serve["ports"][0]["containerPort"] == ServeSettings().port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        # 503 while it opens its model, drains or is stuck; it asks for no key.
        assert serve[probe]["httpGet"] == {"path": middleware.HEALTH, "port": "http"}
    (_, pause) = serve["lifecycle"]["preStop"]["exec"]["command"]
    drain = float(variables["SPEECH_SERVE__DRAIN_SECONDS"])
    close = model.CLOSE_SECONDS
    assert PODS[SERVE]["terminationGracePeriodSeconds"] > float(pause) + drain + close
    service = DOCUMENTS["Service/nightjar-serve"]["spec"]
    assert service["ports"][0]["targetPort"] == serve["ports"][0]["name"]
    assert service["selector"].items() <= DOCUMENTS[SERVE]["spec"]["template"]["metadata"]["labels"].items()
    assert "SPEECH_SERVE__API_KEY" in variables, "without a key it does not open a network's address"
    mounts = {mount["mountPath"] for mount in serve["volumeMounts"]}
    assert variables["SPEECH_SERVE__VOICES_FOLDER"] in mounts


@pytest.mark.parametrize("name", ON_GPUS)
def test_workloads_on_gpus_have_one_and_shared_memory(name: str) -> None:
    assert container(name)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container(name)["image"] in {"nightjar:gpu", "nightjar:vllm"}
    (shared,) = [volume for volume in PODS[name]["volumes"] if volume["name"] == "shm"]
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container(name)["volumeMounts"]
    assert {"/cache"} <= {mount["mountPath"] for mount in container(name)["volumeMounts"]}


@pytest.mark.parametrize("name", [*WORKERS, SERVE])
def test_selectors_find_their_pods(name: str) -> None:
    deployment = DOCUMENTS[name]["spec"]
    labels = deployment["template"]["metadata"]["labels"].items()
    assert deployment["selector"]["matchLabels"].items() <= labels
    budget = DOCUMENTS[name.replace("Deployment", "PodDisruptionBudget")]["spec"]
    assert budget["selector"]["matchLabels"] == deployment["selector"]["matchLabels"]
    assert "minAvailable" not in budget, "one pod alone could never be moved"


def test_no_secret_is_written_down() -> None:
    for name, document in DOCUMENTS.items():
        if document["kind"] != "Secret":
            assert not re.search(
                r"PASSWORD|SECRET|API_KEY|DATABASE_URL|BROKER_URL", yaml.safe_dump(document.get("data", {}))
            ), name
            continue
        for variable, value in document["stringData"].items():
            assert re.search(r"\bPASSWORD\b|\.example$|^KEY$|^SECRET$", value), variable


def test_kubectl_builds_every_kustomization() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    for path in LISTS:
        done = subprocess.run(
            ["kubectl", "kustomize", path.parent], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        for document in yaml.safe_load_all(done.stdout):
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
