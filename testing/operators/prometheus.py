"""A real Prometheus that scrapes one target, and a real Alertmanager that it sends alerts to."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
import yaml

from testcluster import programs
from testcluster.settings import CACHE
from testing.training.launchers import wait_until_true

_NO_USERS: Mapping[str, str] = {}


@contextmanager
def run_prometheus(
    folder: Path, target: str, users: Mapping[str, str] = _NO_USERS, **sections: object
) -> Iterator[str]:
    """Its URL. The target's own labels `namespace` and the like are kept: it acts as the scrape, too.

    `users`: names and bcrypt's hashes of the passwords that it requires. `sections`: parts of its configuration.
    """
    scrape = {"job_name": "gpus", "honor_labels": True, "static_configs": [{"targets": [target]}]}
    global_config = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump({"global": global_config, "scrape_configs": [scrape], **sections}))
    storage_option = f"--storage.tsdb.path={folder / 'data'}"
    web = folder / "web.yaml"
    web.write_text(yaml.safe_dump({"basic_auth_users": dict(users)}))
    options = [f"--config.file={config}", f"--web.config.file={web}", storage_option, "--log.level=warn"]
    with _run_server([str(_find_program()), *options], folder / "log") as url:
        yield url


@contextmanager
def run_alertmanager(folder: Path, webhook: str) -> Iterator[str]:
    """Its URL. `webhook` receives each alert by itself, a second after it has begun or ended."""
    route = {"receiver": "test", "group_by": ["..."], "group_wait": "1s", "group_interval": "1s"}
    receiver = {"name": "test", "webhook_configs": [{"url": webhook, "send_resolved": True}]}
    config = folder / "alertmanager.yaml"
    config.write_text(yaml.safe_dump({"route": route, "receivers": [receiver]}))
    cluster_option = "--cluster.listen-address="
    storage_option = f"--storage.path={folder / 'alerts'}"
    with _run_server(
        [str(programs.find_alertmanager()), f"--config.file={config}", storage_option, cluster_option],
        folder / "alertmanager",
    ) as url:
        yield url


@contextmanager
def _run_server(command: list[str], log: Path) -> Iterator[str]:
    """A server of Prometheus' family on a free port, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with log.open("w") as output:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=output, stderr=output)
    try:
        wait_until_true(lambda: _is_ready(f"http://{address}"), f"{command[0]} is ready", seconds=120)
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def _find_program() -> Path:
    """The test cluster's, or the machine's own."""
    on_path = shutil.which("prometheus")
    built = sorted(CACHE.glob("prometheus-*/prometheus"))
    if not built and on_path is None:
        pytest.skip("there is no Prometheus: the test cluster builds one")
    return built[-1] if built else Path(str(on_path))


def _is_ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/-/ready", timeout=2).status_code in (200, 401)  # 401: it requires a password
    except requests.ConnectionError:
        return False
