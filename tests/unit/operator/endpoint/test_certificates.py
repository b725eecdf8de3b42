"""Which clients trust the endpoint, before and after its certificates are renewed, by real handshakes."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf
import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.endpoint import certificates
from pacekeeper_operator.endpoint.certificates import (
    AUTHORITY_SECRET_NAME,
    CertificateAuthority,
    CertificateManager,
    ServingCertificate,
)
from pacekeeper_operator.kube.client import SECRETS, Object
from pacekeeper_operator.settings import Settings
from testing.kubernetes.fake_cluster import FakeCluster
from testing.operators.virtual_time import Timeline, VirtualRuntime

SETTINGS = Settings(namespace="system", address="127.0.0.1:8443")
NOW = datetime.now(UTC)  # the TLS library checks against the real clock
DAY = timedelta(days=1)


class PresentRuntime(VirtualRuntime):
    """A virtual clock that begins at the present."""

    def now(self) -> float:
        return NOW.timestamp() + self.monotonic()


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
async def manager(cluster: FakeCluster, timeline: Timeline) -> AsyncIterator[CertificateManager]:
    async with run_manager(cluster, timeline, SETTINGS) as manager:
        yield manager


@asynccontextmanager
async def run_manager(
    cluster: FakeCluster, timeline: Timeline, settings: Settings
) -> AsyncIterator[CertificateManager]:
    """Run a certificate manager as the operator does."""
    runtime = PresentRuntime(timeline)
    manager = CertificateManager(cluster, settings, runtime)
    await manager.start()
    task = runtime.start_task(manager.renew_periodically(), "certificates")
    yield manager
    task.cancel()
    assert not runtime.failed.is_set()


@asynccontextmanager
async def serve_tls(context: ssl.SSLContext) -> AsyncIterator[int]:
    """Run a server with this context, and yield its port."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def can_connect(port: int, trusted: str, host: str = "127.0.0.1") -> bool:
    """Return whether a client that trusts only this can connect, as strictly as any TLS library."""
    context = ssl.create_default_context(cadata=trusted)
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=host)
    except ssl.SSLCertVerificationError:
        return False
    writer.close()
    return True


def get_secret(cluster: FakeCluster, name: str = AUTHORITY_SECRET_NAME) -> Object:
    return cluster.objects["secrets", "system", name]


async def write_secret(cluster: FakeCluster, name: str = AUTHORITY_SECRET_NAME, **data: str | bytes) -> None:
    """Create a Secret with these values, or change one that exists."""
    content = {key: value.encode() if isinstance(value, str) else value for key, value in data.items()}
    encoded = {key.replace("_", "."): base64.b64encode(value).decode() for key, value in content.items()}
    found = cluster.objects.get(("secrets", "system", name))
    if found is None:
        await cluster.create(SECRETS, {"metadata": {"name": name, "namespace": "system"}, "data": encoded})
    else:
        await cluster.replace(SECRETS, found | {"data": found["data"] | encoded})


async def create_aging_authority(cluster: FakeCluster) -> CertificateAuthority:
    """Store an authority in the Secret that is past two thirds of its life."""
    authority = certificates.create_authority(NOW - 0.7 * certificates.AUTHORITY_DAYS * DAY)
    await cluster.create(SECRETS, authority.to_secret("system"))
    return authority


class TestOwnAuthority:
    async def test_the_authority_is_created_once(
        self, cluster: FakeCluster, timeline: Timeline, manager: CertificateManager
    ) -> None:
        async with run_manager(cluster, timeline, SETTINGS) as next_one, serve_tls(next_one.context) as port:
            assert next_one.trusted == manager.trusted
            assert await can_connect(port, manager.trusted)

    async def test_no_session_ticket_is_issued(self, manager: CertificateManager) -> None:
        context = ssl.create_default_context(cadata=manager.trusted)
        async with serve_tls(manager.context) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            assert await reader.read() == b""
            session = writer.get_extra_info("ssl_object").session
            assert session is None or not session.has_ticket
            writer.close()

    async def test_only_the_authority_of_the_operator_is_trusted(self, manager: CertificateManager) -> None:
        async with serve_tls(manager.context) as port:
            assert await can_connect(port, manager.trusted)
            assert await can_connect(port, manager.trusted, "pacekeeper.system.svc")
            assert not await can_connect(port, manager.trusted, "example.org")
            assert not await can_connect(port, certificates.create_authority(NOW).certificate)

    async def test_old_and_new_authorities_are_trusted_after_a_renewal(
        self, cluster: FakeCluster, timeline: Timeline
    ) -> None:
        old = await create_aging_authority(cluster)
        async with run_manager(cluster, timeline, SETTINGS) as manager, serve_tls(manager.context) as port:
            new = CertificateAuthority.from_secret(get_secret(cluster))
            assert new.certificate != old.certificate
            assert await can_connect(port, old.certificate), "a worker that started before"
            assert await can_connect(port, new.certificate), "a worker that has only the new one"
            assert await can_connect(port, manager.trusted), "a worker that starts now"
            assert manager.trusted == new.certificate + old.certificate

    async def test_the_next_operator_is_trusted_by_clients_of_old_and_new(
        self, cluster: FakeCluster, timeline: Timeline
    ) -> None:
        old = await create_aging_authority(cluster)
        async with run_manager(cluster, timeline, SETTINGS) as first:
            trusted = first.trusted
        async with run_manager(cluster, timeline, SETTINGS) as manager, serve_tls(manager.context) as port:
            assert manager.trusted == trusted
            assert await can_connect(port, old.certificate)
            assert await can_connect(port, CertificateAuthority.from_secret(get_secret(cluster)).certificate)

    async def test_an_expired_authority_signs_no_bridge(self) -> None:
        old = certificates.create_authority(NOW - 2 * certificates.AUTHORITY_DAYS * DAY)
        new = old.renew(NOW)
        assert (new.trusted, new.bridge) == (new.certificate, "")

    async def test_a_running_server_shows_a_renewed_authority(
        self, cluster: FakeCluster, timeline: Timeline, manager: CertificateManager
    ) -> None:
        old = manager.trusted
        notified: list[str] = []
        manager.on_trust_changed = notified.append
        async with serve_tls(manager.context) as port:
            cluster.objects.clear()
            aging = await create_aging_authority(cluster)  # a user replaces it by another that is due
            await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
            assert notified == [manager.trusted] != [old]
            assert await can_connect(port, aging.certificate)
            assert await can_connect(port, CertificateAuthority.from_secret(get_secret(cluster)).certificate)
            assert not await can_connect(port, old)

    async def test_a_deleted_secret_is_written_again(
        self, cluster: FakeCluster, timeline: Timeline, manager: CertificateManager
    ) -> None:
        before = CertificateAuthority.from_secret(get_secret(cluster))
        cluster.objects.clear()
        await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
        assert CertificateAuthority.from_secret(get_secret(cluster)) == before
        async with serve_tls(manager.context) as port:
            assert await can_connect(port, before.certificate)

    async def test_a_secret_of_an_older_operator_is_used(self, cluster: FakeCluster, timeline: Timeline) -> None:
        authority = certificates.create_authority(NOW)
        await write_secret(cluster, tls_crt=authority.certificate, tls_key=authority.key)
        async with run_manager(cluster, timeline, SETTINGS) as manager, serve_tls(manager.context) as port:
            assert manager.trusted == authority.certificate
            assert await can_connect(port, authority.certificate)

    @pytest.mark.parametrize(
        ("broken", "why"),
        [
            ({"tls_crt": "garbage"}, "tls.crt is not a certificate"),
            ({"tls_key": "garbage"}, "tls.key is not a private key"),
            ({"tls_key": certificates.create_authority(NOW).key}, "tls.key does not belong to tls.crt"),
            ({"tls_key": ""}, "tls.key is missing"),
            ({"tls_crt": b"\x30\x82"}, "tls.crt is not text"),
        ],
        ids=["certificate", "key", "another's key", "no key", "binary certificate"],
    )
    async def test_a_corrupt_secret_is_named_with_a_remedy(
        self, cluster: FakeCluster, broken: dict[str, str | bytes], why: str
    ) -> None:
        authority = certificates.create_authority(NOW)
        values = {"tls_crt": authority.certificate, "tls_key": authority.key} | broken
        await write_secret(cluster, AUTHORITY_SECRET_NAME, **values)
        with pytest.raises(
            InputError, match=f"Secret system/{AUTHORITY_SECRET_NAME}: {why}.*restore it from a backup, or delete it"
        ):
            await CertificateManager(cluster, SETTINGS, OperatorRuntime()).start()

    async def test_a_secret_that_becomes_corrupt_leaves_the_certificate_unchanged(
        self, cluster: FakeCluster, timeline: Timeline, manager: CertificateManager, caplog: pytest.LogCaptureFixture
    ) -> None:
        await write_secret(cluster, tls_crt="garbage")
        await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
        assert f"Secret system/{AUTHORITY_SECRET_NAME}" in caplog.text
        async with serve_tls(manager.context) as port:
            assert await can_connect(port, manager.trusted)

    async def test_the_start_waits_for_an_unavailable_api_server(
        self, cluster: FakeCluster, timeline: Timeline, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        manager, find = CertificateManager(cluster, SETTINGS, PresentRuntime(timeline)), cluster.find

        async def fail_find(*_: Any) -> Object | None:
            raise kopf.TemporaryError("no answer")

        monkeypatch.setattr(cluster, "find", fail_find)
        starting = asyncio.create_task(manager.start())
        await timeline.run(10)
        assert not starting.done()
        monkeypatch.setattr(cluster, "find", find)
        await timeline.run(certificates.CERTIFICATE_STARTUP_RETRY_SECONDS)
        await starting
        assert manager.trusted


def test_a_serving_certificate_is_due_at_two_thirds_of_its_life() -> None:
    serving = certificates.create_authority(NOW).issue_serving_certificate(("localhost",), NOW)
    assert not serving.is_due(NOW + 0.6 * certificates.SERVING_DAYS * DAY)
    assert serving.is_due(NOW + 0.7 * certificates.SERVING_DAYS * DAY)


async def test_a_serving_certificate_is_renewed_while_running(
    cluster: FakeCluster, timeline: Timeline, manager: CertificateManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_tls(manager.context) as port:
        first = await read_certificate(port)
        await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
        assert await read_certificate(port) == first, "it stays while it is valid"
        monkeypatch.setattr(ServingCertificate, "is_due", lambda *_: True)
        await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
        assert await read_certificate(port) != first
        assert await can_connect(port, manager.trusted)
    assert CertificateAuthority.from_secret(get_secret(cluster)).trusted == manager.trusted, "its authority stays"


async def read_certificate(port: int) -> bytes:
    """Return the certificate of the server (DER)."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    assert isinstance(certificate, bytes)
    return certificate


class TestGivenSecret:
    SETTINGS = replace(SETTINGS, tls_secret="theirs")

    async def provide_certificate(self, cluster: FakeCluster, *hosts: str) -> str:
        """Write what cert-manager would write, and return the authority to be trusted."""
        authority = certificates.create_authority(NOW)
        serving = authority.issue_serving_certificate(hosts or ("127.0.0.1",), NOW)
        await write_secret(cluster, "theirs", tls_crt=serving.chain, tls_key=serving.key, ca_crt=authority.certificate)
        return authority.certificate

    async def test_a_provided_certificate_is_shown_and_read_again_when_it_changes(
        self, cluster: FakeCluster, timeline: Timeline
    ) -> None:
        first = await self.provide_certificate(cluster)
        async with run_manager(cluster, timeline, self.SETTINGS) as manager, serve_tls(manager.context) as port:
            assert await can_connect(port, first)
            second = await self.provide_certificate(cluster)
            await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
            assert manager.trusted == second
            assert await can_connect(port, second)
            assert not await can_connect(port, first)
        assert ("secrets", "system", AUTHORITY_SECRET_NAME) not in cluster.objects, "the operator creates no authority"

    async def test_a_certificate_that_no_worker_would_trust_is_refused(self, cluster: FakeCluster) -> None:
        await self.provide_certificate(cluster, "example.org")
        with pytest.raises(InputError, match=r"no worker would trust the certificate for 127\.0\.0\.1"):
            await CertificateManager(cluster, self.SETTINGS, OperatorRuntime()).start()

    async def test_a_field_that_is_missing_is_named(self, cluster: FakeCluster) -> None:
        await write_secret(cluster, "theirs", tls_crt="x", tls_key="y")
        with pytest.raises(InputError, match=r"Secret system/theirs \(tls_secret\): ca.crt is missing"):
            await CertificateManager(cluster, self.SETTINGS, OperatorRuntime()).start()

    async def test_the_start_waits_for_a_missing_secret(self, cluster: FakeCluster, timeline: Timeline) -> None:
        manager = CertificateManager(cluster, self.SETTINGS, PresentRuntime(timeline))
        starting = asyncio.create_task(manager.start())
        await timeline.run(60)
        assert not starting.done()
        trusted = await self.provide_certificate(cluster)
        await timeline.run(certificates.CERTIFICATE_STARTUP_RETRY_SECONDS)
        await starting
        assert manager.trusted == trusted

    async def test_a_deleted_provided_secret_leaves_the_certificate_unchanged(
        self, cluster: FakeCluster, timeline: Timeline
    ) -> None:
        trusted = await self.provide_certificate(cluster)
        async with run_manager(cluster, timeline, self.SETTINGS) as manager, serve_tls(manager.context) as port:
            cluster.objects.clear()
            await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
            assert await can_connect(port, trusted)
