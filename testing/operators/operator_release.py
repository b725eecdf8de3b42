"""The operator as users run it: in the cluster, installed by Helm."""

from __future__ import annotations

import pytest

from testcluster import release
from testing.kubernetes.cluster import KubectlCluster


@pytest.fixture(scope="session")
def operator(cluster: KubectlCluster) -> None:
    """It runs the checkout's present sources. It stays installed: jobs that a test has left need it to go away."""
    if not cluster.is_testcluster:
        pytest.skip("these tests need the images of the cluster of `make cluster`")
    release.install_release()
