"""Prometheus behind TLS, tokens, passwords, client certificates, and gateways. Only the answers are simulated."""

from __future__ import annotations

import base64
import json
import re
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
from requests.exceptions import RequestException

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.api.conditions import JobCondition, Reason
from pacekeeper_operator.api.training_job import JobStatus
from pacekeeper_operator.decide.lifecycle.status import build_job_status
from pacekeeper_operator.observe import prometheus_access
from pacekeeper_operator.observe.prometheus import PrometheusClient, build_gpu_signs_query, build_query
from pacekeeper_operator.observe.prometheus_access import PrometheusAccessDenied, create_http_query
from pacekeeper_operator.settings import Settings
from testing.operators.observations import build_policy, build_training
from testing.operators.prometheus import run_prometheus
from testing.operators.tls import Authority
from testing.training.launchers import wait_until_true

TOKEN = "eyJhbGciOi.c2VjcmV0"
PASSWORD, BCRYPT = "open sesame", "$2b$04$abcdefghijklmnopqrstuu/LVz6MZlItEy42I2juLihZ66HnQx/cy"
HEADERS = (("X-Scope-OrgID", "training"), ("X-Api-Key", "k3y9"))


class Gateway(ThreadingHTTPServer):
    """Answers requests with the `required` headers, over TLS where there is an authority."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.context: ssl.SSLContext | None = None
        self.required: dict[str, str] = {}
        self.refusal = 401
        self.redirect = ""
        self.requests_seen: list[Mapping[str, str]] = []

    @property
    def url(self) -> str:
        return f"{'https' if self.context else 'http'}://localhost:{self.server_port}"

    def finish_request(self, request: Any, client_address: Any) -> None:
        wrapped = self.context.wrap_socket(request, server_side=True) if self.context else request
        try:
            super().finish_request(wrapped, client_address)
        finally:
            wrapped.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: some tests let the client close the connection."""


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        gateway = self.server
        gateway.requests_seen.append(dict(self.headers))
        admitted = all(self.headers.get(name) == value for name, value in gateway.required.items())
        self.send_response(302 if gateway.redirect else 200 if admitted else gateway.refusal)
        if gateway.redirect:
            self.send_header("Location", gateway.redirect)
        self.end_headers()
        answer = {"status": "success", "data": {"result": []}} if admitted else {"you sent": self.list_credentials()}
        self.wfile.write(json.dumps(answer, ensure_ascii=False).encode())

    def list_credentials(self) -> list[str]:
        """Return the headers, and the decoded user name and password."""
        kind, _, value = self.headers.get("Authorization", "").partition(" ")
        return [*self.headers.values(), base64.b64decode(value).decode() if kind == "Basic" else ""]

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    yield from run_gateway()


@pytest.fixture
def elsewhere() -> Iterator[Gateway]:
    yield from run_gateway()


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    with run_prometheus(folder, "127.0.0.1:9", users={"pacekeeper": BCRYPT}) as url:
        ready = f"{url}/-/ready"
        wait_until_true(
            lambda: requests.get(ready, auth=("pacekeeper", PASSWORD), timeout=60).ok, "Prometheus is ready"
        )
        yield url


def run_gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def mount_secret(folder: Path, **keys: str | bytes) -> Path:
    """Write files as the kubelet does: all change at once. An underscore in a key is a dot."""
    number = len(list(folder.glob("..v*")))
    version = folder / f"..v{number}"
    version.mkdir(parents=True)
    for name, value in keys.items():
        (version / name.replace("_", ".")).write_bytes(value.encode() if isinstance(value, str) else value)
        link = folder / name.replace("_", ".")
        if not link.is_symlink():
            link.symlink_to(Path("..data", link.name))
    (folder / "..next").symlink_to(version.name)
    (folder / "..next").rename(folder / "..data")
    return folder


def create_authority(folder: Path) -> Authority:
    folder.mkdir()
    return Authority(folder)


async def test_a_bearer_token_an_authority_and_headers_are_used(gateway: Gateway, tmp_path: Path) -> None:
    own = create_authority(tmp_path / "ca")
    gateway.context = own.server_context()
    gateway.required = {"Authorization": f"Bearer {TOKEN}", **dict(HEADERS)}
    folder = mount_secret(tmp_path / "secret", token=f"{TOKEN}\n", ca_crt=own.pem)
    assert await create_http_query(gateway.url, folder, HEADERS)("up", 3.0) == []
    sample = await PrometheusClient(gateway.url, "gpus", "", create_http_query(gateway.url, folder, HEADERS)).sample(
        1.0
    )
    assert not sample.error


async def test_a_user_name_and_a_password_may_be_of_any_language(gateway: Gateway, tmp_path: Path) -> None:
    required = base64.b64encode("jürgen:pass:wörd ✓".encode()).decode()
    gateway.required = {"Authorization": f"Basic {required}"}
    folder = mount_secret(tmp_path / "secret", username="jürgen\n", password="pass:wörd ✓\n")
    assert await create_http_query(gateway.url, folder)("up", 3.0) == []


async def test_a_client_certificate_is_used(gateway: Gateway, tmp_path: Path) -> None:
    own, clients = create_authority(tmp_path / "ca"), create_authority(tmp_path / "clients")
    gateway.context = own.server_context()
    gateway.context.verify_mode = ssl.CERT_REQUIRED
    gateway.context.load_verify_locations(cadata=clients.pem)
    key = (tmp_path / "clients/server.key").read_bytes()
    folder = mount_secret(tmp_path / "secret", ca_crt=own.pem, tls_crt=clients.pem, tls_key=key)
    assert await create_http_query(gateway.url, folder)("up", 3.0) == []
    without = create_http_query(gateway.url, mount_secret(tmp_path / "without", ca_crt=own.pem))
    with pytest.raises(RequestException):
        await without("up", 3.0)


async def test_renewed_credentials_are_used_in_the_next_query(gateway: Gateway, tmp_path: Path) -> None:
    old, new = create_authority(tmp_path / "old"), create_authority(tmp_path / "new")
    gateway.context = old.server_context()
    gateway.required = {"Authorization": f"Bearer {TOKEN}"}
    folder = mount_secret(tmp_path / "secret", token=TOKEN, ca_crt=old.pem)
    query = create_http_query(gateway.url, folder)
    await query("up", 3.0)
    gateway.context, gateway.required = new.server_context(), {"Authorization": "Bearer next"}
    with pytest.raises(PrometheusAccessDenied, match=r"certificate verify failed.*check ca\.crt"):
        await query("up", 3.0)
    mount_secret(folder, token=TOKEN, ca_crt=new.pem)
    with pytest.raises(PrometheusAccessDenied, match="HTTP 401"):
        await query("up", 3.0)
    mount_secret(folder, token="next", ca_crt=new.pem)
    assert await query("up", 3.0) == []


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_states_the_remedy_and_shows_no_secret(gateway: Gateway, tmp_path: Path, status: int) -> None:
    gateway.required, gateway.refusal = {"Authorization": "Bearer another"}, status
    query = create_http_query(gateway.url, mount_secret(tmp_path / "secret", token=TOKEN), HEADERS)
    sample = await PrometheusClient(gateway.url, "gpus", "", query).sample(1.0)
    assert sample.access_denied
    assert sample.get_metrics("ns", "j").prometheus_denied
    assert f"refuses the operator (HTTP {status})" in sample.error
    assert "prometheus.secretName" in sample.error
    rates = await PrometheusClient(gateway.url, "", "", query).read_link_rates("up")
    assert f"HTTP {status}" in rates.error
    for secret in (TOKEN, "k3y9"):
        assert secret not in sample.error + rates.error


@pytest.mark.parametrize(
    ("password", "reason"), [(PASSWORD, Reason.PROMETHEUS_AVAILABLE), ("sesame", Reason.PROMETHEUS_ACCESS_DENIED)]
)
async def test_a_prometheus_that_requires_a_password_is_a_condition_of_the_job(
    protected: str, tmp_path: Path, password: str, reason: Reason
) -> None:
    """A real Prometheus is used, and its answer becomes a condition of the job."""
    folder = mount_secret(tmp_path / "secret", username="pacekeeper", password=password)
    sample = await PrometheusClient(protected, "gpus", "", create_http_query(protected, folder)).sample(1.0)
    observation = replace(build_training(), metrics=sample.get_metrics("ns", "j"))
    conditions = build_job_status(observation, build_policy(), JobStatus()).conditions
    condition = next(one for one in conditions if one.type == JobCondition.METRICS_AVAILABLE)
    assert condition.reason == reason
    assert password not in condition.message


@pytest.mark.parametrize("keys", [{"token": TOKEN}, {"username": "mé", "password": "s3crèt"}], ids=str)
async def test_an_answer_that_repeats_the_credentials_is_not_repeated(
    gateway: Gateway, tmp_path: Path, keys: dict[str, str]
) -> None:
    """The status of a Fabric shows errors of its query."""
    gateway.required, gateway.refusal = {"Authorization": "Bearer another"}, 400
    query = create_http_query(gateway.url, mount_secret(tmp_path / "secret", **keys), HEADERS)
    rates = await PrometheusClient(gateway.url, "", "", query).read_link_rates("up")
    assert "you sent" in rates.error
    for secret in (TOKEN, "k3y9", "s3cr", base64.b64encode("mé:s3crèt".encode()).decode()):
        assert secret not in rates.error


async def test_credentials_do_not_follow_a_redirect(gateway: Gateway, elsewhere: Gateway, tmp_path: Path) -> None:
    gateway.redirect = f"{elsewhere.url}/login?next=1"
    query = create_http_query(gateway.url, mount_secret(tmp_path / "secret", token=TOKEN), HEADERS)
    with pytest.raises(PrometheusAccessDenied, match="redirects the operator to localhost; redirects are not followed"):
        await query("up", 3.0)
    assert len(gateway.requests_seen) == 1
    assert not elsewhere.requests_seen


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "does not exist, or has none of token"),
        ({"tokn": TOKEN}, "has none of token"),
        ({"username": "u"}, "has username without password"),
        ({"password": "p"}, "has password without username"),
        ({"tls_crt": "c"}, "has tls.crt without tls.key"),
        ({"token": TOKEN, "username": "u", "password": "p"}, "both token and username"),
        ({"token": " \n"}, "token in .* is empty"),
        ({"token": "two\r\nX-Admin: yes"}, "characters that no token has"),
        ({"token": b"\xff\xfe"}, "characters that no token has"),
    ],
    ids=str,
)
async def test_invalid_credentials_are_reported_and_not_sent(
    gateway: Gateway, tmp_path: Path, keys: dict[str, str], message: str
) -> None:
    with pytest.raises(PrometheusAccessDenied, match=message) as refused:
        await create_http_query(gateway.url, mount_secret(tmp_path / "secret", **keys))("up", 3.0)
    assert not any(str(value) in str(refused.value) for value in keys.values() if len(value) > 1)
    assert not gateway.requests_seen


@pytest.mark.parametrize("key", ["ca_crt", "tls_crt"])
async def test_an_invalid_certificate_is_an_error_of_the_sample(gateway: Gateway, tmp_path: Path, key: str) -> None:
    own = create_authority(tmp_path / "ca")
    gateway.context = own.server_context()
    keys = {"ca_crt": own.pem, key: "nonsense"} | ({"tls_key": "nonsense"} if key == "tls_crt" else {})
    query = create_http_query(gateway.url, mount_secret(tmp_path / "secret", **keys))
    sample = await PrometheusClient(gateway.url, "gpus", "", query).sample(1.0)
    assert sample.error, "the operator continues in any case"


async def test_files_that_vanish_while_they_are_read_fail_one_query(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = create_authority(tmp_path / "ca")
    gateway.context = own.server_context()
    monkeypatch.setattr(prometheus_access, "_read_credentials", lambda _: {"ca.crt": b"gone since"})
    sample = await PrometheusClient(
        gateway.url, "gpus", "", create_http_query(gateway.url, tmp_path / "secret")
    ).sample(1.0)
    assert sample.access_denied
    assert "cannot be read" in sample.error


class TestOptions:
    GIVEN: Mapping[str, str] = {
        "PACEKEEPER_PROMETHEUS_HEADERS": '{"X-Scope-OrgID": "a|b"}',
        "PACEKEEPER_PROMETHEUS_MATCHERS": r'["cluster=\"a\"", "region =~ \"eu-.*|\\\"x\\\\.\""]',
    }

    def test_headers_and_matchers_are_read_from_the_environment(self) -> None:
        settings = Settings.from_environment(self.GIVEN)
        assert settings.prometheus_headers == (("X-Scope-OrgID", "a|b"),)
        assert settings.prometheus_matchers == ('cluster="a"', r'region =~ "eu-.*|\"x\\."')

    @pytest.mark.parametrize("build", [build_query, build_gpu_signs_query])
    def test_matchers_are_in_every_selector(self, build: Any) -> None:
        plain, text = build("gpus"), build("gpus", ('cluster="a"',))
        assert len(re.findall(r"\{[a-z_]", text)) == text.count('cluster="a"') > 0
        assert text.replace(',cluster="a"', "") == plain

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("HEADERS", "{", "not JSON"),
            ("HEADERS", "[]", "an object"),
            ("HEADERS", '{"X Scope": "a"}', "'X Scope' is no header's name"),
            ("HEADERS", '{"X\\n": "a"}', "no header's name"),
            ("HEADERS", '{"X-Scope-OrgID": "s3cret\\nX-Admin: yes"}', "the value of X-Scope-OrgID"),
            ("HEADERS", '{"X-Scope-OrgID": 7}', "the value of X-Scope-OrgID"),
            ("HEADERS", '{"X-Scope-OrgID": ""}', "the value of X-Scope-OrgID"),
            ("HEADERS", '{"authorization": "Bearer s3cret"}', "authorization is a secret"),
            ("MATCHERS", 'cluster="a"', "not JSON"),
            ("MATCHERS", '{"cluster": "a"}', "no list"),
            ("MATCHERS", '["cluster"]', "'cluster' is no matcher"),
            ("MATCHERS", '["cluster=a"]', "no matcher"),
            ("MATCHERS", r'["cluster=\"a\"} or vector(1) or x{y=\"\""]', "no matcher"),
            ("MATCHERS", r'["a=\"b\",c=\"d\""]', "no matcher"),
            ("MATCHERS", r'["__name__=\"up\""]', "the label __name__"),
            ("MATCHERS", "[7]", "7 is no matcher"),
            ("URL", "http://me:s3cret@prometheus.monitoring", "holds a user's name"),
            ("URL", "http://[s3cret", "is no URL"),
        ],
    )
    def test_a_bad_value_is_named_and_secrets_are_not_shown(self, name: str, text: str, message: str) -> None:
        with pytest.raises(InputError, match=message) as refused:
            Settings.from_environment({f"PACEKEEPER_PROMETHEUS_{name}": text})
        assert str(refused.value).startswith(f"PACEKEEPER_PROMETHEUS_{name}: ")
        assert "s3cret" not in str(refused.value)
