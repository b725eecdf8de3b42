"""Who trusts the endpoint, before and after its certificates are renewed: by real handshakes over real sockets."""

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
NOW = datetime.now(UTC)  # the TLS library judges by the real clock
DAY = timedelta(days=1)


class Present(VirtualRuntime):
    """Virtual durations from the present on."""

    def now(self) -> float:
        return NOW.timestamp() + self.monotonic()


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
async def keeping(cluster: FakeCluster, timeline: Timeline) -> AsyncIterator[CertificateManager]:
    async with keep(cluster, timeline, SETTINGS) as kept:
        yield kept


@asynccontextmanager
async def keep(cluster: FakeCluster, timeline: Timeline, settings: Settings) -> AsyncIterator[CertificateManager]:
    """Certificates as the operator keeps them while it runs."""
    runtime = Present(timeline)
    kept = CertificateManager(cluster, settings, runtime)
    await kept.start()
    task = runtime.start_task(kept.renew_periodically(), "keeper")
    yield kept
    task.cancel()
    assert not runtime.failed.is_set()


@asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server with this context; its port."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def connects(port: int, trusted: str, host: str = "127.0.0.1") -> bool:
    """Whether a client that trusts only this does, as strictly as any TLS library."""
    context = ssl.create_default_context(cadata=trusted)
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=host)
    except ssl.SSLCertVerificationError:
        return False
    writer.close()
    return True


def secret(cluster: FakeCluster, name: str = AUTHORITY_SECRET_NAME) -> Object:
    return cluster.objects["secrets", "system", name]


async def write(cluster: FakeCluster, name: str = AUTHORITY_SECRET_NAME, **data: str) -> None:
    """A Secret with these texts; one that exists is changed."""
    encoded = {key.replace("_", "."): base64.b64encode(text.encode()).decode() for key, text in data.items()}
    found = cluster.objects.get(("secrets", "system", name))
    if found is None:
        await cluster.create(SECRETS, {"metadata": {"name": name, "namespace": "system"}, "data": encoded})
    else:
        await cluster.replace(SECRETS, found | {"data": found["data"] | encoded})


async def aged(cluster: FakeCluster) -> CertificateAuthority:
    """An authority that stands in the Secret, and of whose life two thirds are over."""
    authority = certificates.create_authority(NOW - 0.7 * certificates.AUTHORITY_DAYS * DAY)
    await cluster.create(SECRETS, authority.to_secret("system"))
    return authority


class TestOwnAuthority:
    async def test_is_made_once(self, cluster: FakeCluster, timeline: Timeline, keeping: CertificateManager) -> None:
        async with keep(cluster, timeline, SETTINGS) as next_one, listening(next_one.context) as port:
            assert next_one.trusted == keeping.trusted
            assert await connects(port, keeping.trusted)

    async def test_nobody_is_given_a_ticket_that_the_next_operator_would_not_know(
        self, keeping: CertificateManager
    ) -> None:
        context = ssl.create_default_context(cadata=keeping.trusted)
        async with listening(keeping.context) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            assert await reader.read() == b""
            session = writer.get_extra_info("ssl_object").session
            assert session is None or not session.has_ticket
            writer.close()

    async def test_alone_is_trusted(self, keeping: CertificateManager) -> None:
        async with listening(keeping.context) as port:
            assert await connects(port, keeping.trusted)
            assert await connects(port, keeping.trusted, "pacekeeper.system.svc")
            assert not await connects(port, keeping.trusted, "example.org")
            assert not await connects(port, certificates.create_authority(NOW).certificate)

    async def test_old_and_new_are_trusted_once_it_is_renewed(self, cluster: FakeCluster, timeline: Timeline) -> None:
        old = await aged(cluster)
        async with keep(cluster, timeline, SETTINGS) as kept, listening(kept.context) as port:
            new = CertificateAuthority.from_secret(secret(cluster))
            assert new.certificate != old.certificate
            assert await connects(port, old.certificate), "a worker from before"
            assert await connects(port, new.certificate), "one that knows only the new one"
            assert await connects(port, kept.trusted), "one that is made now"
            assert kept.trusted == new.certificate + old.certificate

    async def test_the_next_operator_is_trusted_by_old_and_new(self, cluster: FakeCluster, timeline: Timeline) -> None:
        old = await aged(cluster)
        async with keep(cluster, timeline, SETTINGS) as first:
            trusted = first.trusted
        async with keep(cluster, timeline, SETTINGS) as kept, listening(kept.context) as port:
            assert kept.trusted == trusted
            assert await connects(port, old.certificate)
            assert await connects(port, CertificateAuthority.from_secret(secret(cluster)).certificate)

    async def test_one_that_has_ended_vouches_for_nobody(self) -> None:
        old = certificates.create_authority(NOW - 2 * certificates.AUTHORITY_DAYS * DAY)
        new = old.renew(NOW)
        assert (new.trusted, new.bridge) == (new.certificate, "")

    async def test_it_is_renewed_while_running_without_a_new_server(
        self, cluster: FakeCluster, timeline: Timeline, keeping: CertificateManager
    ) -> None:
        old = keeping.trusted
        told: list[str] = []
        keeping.on_trust_changed = told.append
        async with listening(keeping.context) as port:
            cluster.objects.clear()
            aging = await aged(cluster)  # somebody puts another in its place, which is due
            await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
            assert told == [keeping.trusted] != [old]
            assert await connects(port, aging.certificate)
            assert await connects(port, CertificateAuthority.from_secret(secret(cluster)).certificate)
            assert not await connects(port, old)

    async def test_a_deleted_secret_is_written_anew(
        self, cluster: FakeCluster, timeline: Timeline, keeping: CertificateManager
    ) -> None:
        before = CertificateAuthority.from_secret(secret(cluster))
        cluster.objects.clear()
        await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
        assert CertificateAuthority.from_secret(secret(cluster)) == before
        async with listening(keeping.context) as port:
            assert await connects(port, before.certificate)

    async def test_a_secret_of_an_older_operator_is_good(self, cluster: FakeCluster, timeline: Timeline) -> None:
        authority = certificates.create_authority(NOW)
        await write(cluster, tls_crt=authority.certificate, tls_key=authority.key)
        async with keep(cluster, timeline, SETTINGS) as kept, listening(kept.context) as port:
            assert kept.trusted == authority.certificate
            assert await connects(port, authority.certificate)

    @pytest.mark.parametrize(
        ("broken", "why"),
        [
            ({"tls_crt": "garbage"}, "tls.crt is not a certificate"),
            ({"tls_key": "garbage"}, "tls.key is not a private key"),
            ({"tls_key": certificates.create_authority(NOW).key}, "tls.key does not belong to tls.crt"),
            ({"tls_key": ""}, "tls.key is missing"),
        ],
        ids=["certificate", "key", "another's key", "no key"],
    )
    async def test_a_corrupt_secret_is_named_with_a_remedy(
        self, cluster: FakeCluster, broken: dict[str, str], why: str
    ) -> None:
        authority = certificates.create_authority(NOW)
        await write(cluster, **{"tls_crt": authority.certificate, "tls_key": authority.key} | broken)
        with pytest.raises(
            InputError, match=f"Secret system/{AUTHORITY_SECRET_NAME}: {why}.*restore it from a backup, or delete it"
        ):
            await CertificateManager(cluster, SETTINGS, OperatorRuntime()).start()

    async def test_a_secret_that_becomes_corrupt_changes_nothing_that_is_shown(
        self, cluster: FakeCluster, timeline: Timeline, keeping: CertificateManager, caplog: pytest.LogCaptureFixture
    ) -> None:
        await write(cluster, tls_crt="garbage")
        await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
        assert f"Secret system/{AUTHORITY_SECRET_NAME}" in caplog.text
        async with listening(keeping.context) as port:
            assert await connects(port, keeping.trusted)

    async def test_an_api_server_that_is_away_at_first_is_waited_for(
        self, cluster: FakeCluster, timeline: Timeline, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept, find = CertificateManager(cluster, SETTINGS, Present(timeline)), cluster.find

        async def away(*_: Any) -> Object | None:
            raise kopf.TemporaryError("no answer")

        monkeypatch.setattr(cluster, "find", away)
        beginning = asyncio.create_task(kept.start())
        await timeline.run(10)
        assert not beginning.done()
        monkeypatch.setattr(cluster, "find", find)
        await timeline.run(certificates.CERTIFICATE_STARTUP_RETRY_SECONDS)
        await beginning
        assert kept.trusted


def test_a_serving_certificate_is_due_at_two_thirds_of_its_life() -> None:
    serving = certificates.create_authority(NOW).issue_serving_certificate(("localhost",), NOW)
    assert not serving.is_due(NOW + 0.6 * certificates.SERVING_DAYS * DAY)
    assert serving.is_due(NOW + 0.7 * certificates.SERVING_DAYS * DAY)


async def test_a_serving_certificate_is_renewed_while_running(
    cluster: FakeCluster, timeline: Timeline, keeping: CertificateManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening(keeping.context) as port:
        first = await certificate_of(port)
        await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
        assert await certificate_of(port) == first, "while it is good it stays"
        monkeypatch.setattr(ServingCertificate, "is_due", lambda *_: True)
        await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
        assert await certificate_of(port) != first
        assert await connects(port, keeping.trusted)
    assert CertificateAuthority.from_secret(secret(cluster)).trusted == keeping.trusted, "and its authority stays"


async def certificate_of(port: int) -> bytes:
    """What the server shows (DER)."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    assert isinstance(shown, bytes)
    return shown


class TestGivenSecret:
    SETTINGS = replace(SETTINGS, tls_secret="theirs")

    async def give(self, cluster: FakeCluster, *hosts: str) -> str:
        """What cert-manager would write; the authority to be trusted."""
        authority = certificates.create_authority(NOW)
        serving = authority.issue_serving_certificate(hosts or ("127.0.0.1",), NOW)
        await write(cluster, "theirs", tls_crt=serving.chain, tls_key=serving.key, ca_crt=authority.certificate)
        return authority.certificate

    async def test_is_shown_and_read_anew_when_it_changes(self, cluster: FakeCluster, timeline: Timeline) -> None:
        first = await self.give(cluster)
        async with keep(cluster, timeline, self.SETTINGS) as kept, listening(kept.context) as port:
            assert await connects(port, first)
            second = await self.give(cluster)
            await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
            assert kept.trusted == second
            assert await connects(port, second)
            assert not await connects(port, first)
        assert ("secrets", "system", AUTHORITY_SECRET_NAME) not in cluster.objects, "no authority of our own is made"

    async def test_what_no_worker_would_trust_is_named(self, cluster: FakeCluster) -> None:
        await self.give(cluster, "example.org")
        with pytest.raises(InputError, match=r"no worker would trust the certificate for 127\.0\.0\.1"):
            await CertificateManager(cluster, self.SETTINGS, OperatorRuntime()).start()

    async def test_a_field_that_is_missing_is_named(self, cluster: FakeCluster) -> None:
        await write(cluster, "theirs", tls_crt="x", tls_key="y")
        with pytest.raises(InputError, match=r"Secret system/theirs \(tls_secret\): ca.crt is missing"):
            await CertificateManager(cluster, self.SETTINGS, OperatorRuntime()).start()

    async def test_it_is_waited_for(self, cluster: FakeCluster, timeline: Timeline) -> None:
        kept = CertificateManager(cluster, self.SETTINGS, Present(timeline))
        beginning = asyncio.create_task(kept.start())
        await timeline.run(60)
        assert not beginning.done()
        trusted = await self.give(cluster)
        await timeline.run(certificates.CERTIFICATE_STARTUP_RETRY_SECONDS)
        await beginning
        assert kept.trusted == trusted

    async def test_once_it_is_gone_what_was_shown_stays(self, cluster: FakeCluster, timeline: Timeline) -> None:
        trusted = await self.give(cluster)
        async with keep(cluster, timeline, self.SETTINGS) as kept, listening(kept.context) as port:
            cluster.objects.clear()
            await timeline.run(certificates.CERTIFICATE_CHECK_INTERVAL_SECONDS + 1)
            assert await connects(port, trusted)
