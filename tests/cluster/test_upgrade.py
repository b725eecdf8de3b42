"""By Helm: as the README installs it, and from the version before to this one and back, where what is stored stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testcluster import programs
from testcluster.release import FORCE_OPTIONS, VALUES
from testing.kubernetes.chart import CHART, RELEASE, REPOSITORY, SYSTEM, run_helm
from testing.kubernetes.cluster import KubectlCluster, wait_for
from testing.kubernetes.definitions import PREVIOUS
from testing.kubernetes.resources import scale_operator, wait_for_operator_pods
from testing.readme import read_commands

pytestmark = pytest.mark.usefixtures("resources")

NO_OPERATOR = "image.repository=127.0.0.1:1/none,image.pullPolicy=Never"
"""Its pod never starts: only the definitions are checked."""
REPOSITORY_OF_THE_README = "registry.example/pacekeeper/operator"
NEW_IN_STATUS = {"leafCrossings": {"now": 2, "best": 1}}
"""A field that the version before does not have."""
STATUS = {"phase": "Running", "step": 7}


@pytest.fixture
def chart_before(tmp_path: Path) -> Path:
    """This chart with the definitions of the version before."""
    chart = Path(shutil.copytree(CHART, tmp_path / "pacekeeper"))
    shutil.rmtree(chart / "files/crds")
    shutil.copytree(PREVIOUS, chart / "files/crds")
    return chart


@pytest.fixture
def release(cluster: KubectlCluster) -> Iterator[Callable[..., str]]:
    """Helm in the operator's namespace. The release is afterwards what it was before, with its operator at rest."""

    def run(command: str, *arguments: str) -> str:
        return run_helm(command, *arguments, "--namespace", SYSTEM, "--kubeconfig", str(cluster.kubeconfig))

    found = json.loads(run("list", "--filter", f"^{RELEASE}$", "--output", "json"))
    yield run
    if found:
        run("rollback", RELEASE, found[0]["revision"], *FORCE_OPTIONS)
        scale_operator(cluster, 0)
    else:
        run("uninstall", RELEASE, "--no-hooks", "--ignore-not-found")
        wait_for_operator_pods(cluster, 0)


def test_it_is_installed_in_observe_only_mode_as_the_readme_says(
    cluster: KubectlCluster, release: Callable[..., str]
) -> None:
    install, check = read_commands("Install it")
    ours = yaml.safe_load(VALUES.read_text())
    install = install.replace(REPOSITORY_OF_THE_README, ours["image"]["repository"])
    # In addition to the image: a Service keeps its address for as long as it lives, and the fixture needs it unchanged.
    settings = f"image.tag={ours['image']['tag']},service.clusterIP={ours['service']['clusterIP']}"
    # What is there already makes place, and is known to the fixture afterwards.
    release("uninstall", RELEASE, "--keep-history", "--no-hooks", "--ignore-not-found", "--wait")
    output = run_command(" ".join([install, "--set", settings, "--replace", *FORCE_OPTIONS]), cluster)
    assert "Remedies: Recommend; quarantine of nodes: Recommend." in output
    cluster.kubectl("rollout", "status", f"deployment/{RELEASE}", "-n", SYSTEM, "--timeout=120s")
    output = run_command(check, cluster)
    assert output.startswith(("no TrainingJobs", "NAMESPACE"))


def test_an_upgrade_and_a_rollback_keep_what_is_stored(
    cluster: KubectlCluster, namespace: str, release: Callable[..., str], chart_before: Path
) -> None:
    install = ("upgrade", "--install", RELEASE, "--create-namespace", *FORCE_OPTIONS, "--set", NO_OPERATOR)

    release(*install, str(chart_before))
    before = json.loads(release("list", "--filter", f"^{RELEASE}$", "--output", "json"))[0]["revision"]
    wait_until_known(cluster, leaf_crossings=False)
    cluster.apply(JOB, namespace)
    write_status(cluster, namespace, STATUS)
    stored = read_job(cluster, namespace)
    assert stored["status"] == STATUS

    release(*install, str(CHART))
    wait_until_known(cluster, leaf_crossings=True)
    now = read_job(cluster, namespace)
    assert now["metadata"]["uid"] == stored["metadata"]["uid"]
    assert is_kept(stored["spec"], now["spec"]), "new fields may have come with their defaults"
    assert now["status"] == STATUS
    wait_for(lambda: write_status(cluster, namespace, NEW_IN_STATUS), 120, "the new field is stored")
    assert read_job(cluster, namespace)["status"] == STATUS | NEW_IN_STATUS

    release("rollback", RELEASE, before, *FORCE_OPTIONS)
    wait_until_known(cluster, leaf_crossings=False)
    wait_for(lambda: is_same(read_job(cluster, namespace), stored), 120, "only the new fields are gone")
    cluster.kubectl("patch", "tj", "gpt", "-n", namespace, "--type=merge", "--patch", '{"spec":{"suspend":true}}')
    assert cluster.list("fabrics") == [], "a kind that the version before does not have stays, and does no harm"

    release(*install, str(CHART))
    wait_until_known(cluster, leaf_crossings=True)
    after = read_job(cluster, namespace)
    assert is_kept(stored["spec"] | {"suspend": True}, after["spec"])
    assert after["status"] == STATUS


def run_command(command: str, cluster: KubectlCluster) -> str:
    """The output for a user who has cloned the repository, has Helm and kubectl, and has `pip install`ed."""
    path = [Path(sys.executable).parent, programs.find_kubectl().parent, os.environ["PATH"]]
    environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig), "PATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        ["bash", "-ec", command], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


JOB: dict[str, Any] = {
    "apiVersion": "pacekeeper.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "gpt"},
    "spec": {
        "template": {
            "spec": {
                "schedulerName": "none",
                "containers": [
                    {
                        "name": "trainer",
                        "image": "pacekeeper.dev/trainer:dev",
                        "command": ["pacekeeper", "run", "train.py"],
                        "resources": {"limits": {"cpu": "400m"}},
                    }
                ],
            }
        }
    },
}


def wait_until_known(cluster: KubectlCluster, *, leaf_crossings: bool) -> None:
    """Until the API server goes by the definition: what it publishes is made of what it validates by."""

    def published() -> bool:
        schemas = json.loads(cluster.kubectl("get", "--raw", "/openapi/v3/apis/pacekeeper.dev/v1alpha1"))
        status = schemas["components"]["schemas"]["dev.pacekeeper.v1alpha1.TrainingJob"]["properties"]["status"]
        return ("leafCrossings" in status["properties"]) is leaf_crossings

    wait_for(published, 120, f"leafCrossings is {'known' if leaf_crossings else 'unknown'}")


def read_job(cluster: KubectlCluster, namespace: str) -> Any:
    return cluster.get("tj", "gpt", namespace)


def is_kept(before: Any, now: Any) -> bool:
    """Whether each field that was there is there, and as it was."""
    if isinstance(before, dict):
        return isinstance(now, dict) and all(name in now and is_kept(before[name], now[name]) for name in before)
    return bool(now == before)


def is_same(now: Any, before: Any) -> bool:
    return (now["metadata"]["uid"], now["spec"], now["status"]) == (
        before["metadata"]["uid"],
        before["spec"],
        before["status"],
    )


def write_status(cluster: KubectlCluster, namespace: str, status: dict[str, Any]) -> bool:
    """Whether all of it is stored."""
    patch = json.dumps({"status": status})
    cluster.kubectl("patch", "tj", "gpt", "-n", namespace, "--subresource=status", "--type=merge", "--patch", patch)
    return bool(status.items() <= read_job(cluster, namespace)["status"].items())
