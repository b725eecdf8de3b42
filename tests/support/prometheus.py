"""A real Prometheus that scrapes one target."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
import yaml

from testcluster.settings import CACHE
from tests.support.launchers import eventually


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Its URL. What the target says of `namespace` and the like stands: it plays the scrape's part, too."""
    program = _program()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scrape = {"job_name": "gpus", "honor_labels": True, "static_configs": [{"targets": [target]}]}
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                str(program),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: _is_ready(url), "Prometheus is ready", seconds=30)
        yield url
    finally:
        process.kill()
        process.wait()


def _program() -> Path:
    """The test cluster's, or the machine's own."""
    found = shutil.which("prometheus")
    built = sorted(CACHE.glob("prometheus-*/prometheus"))
    if not built and found is None:
        pytest.skip("there is no Prometheus: the test cluster builds one")
    return built[-1] if built else Path(str(found))


def _is_ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/-/ready", timeout=2).ok
    except requests.ConnectionError:
        return False
