"""Prometheus behind TLS, tokens, passwords, client certificates and gateways: real HTTPS; only answers are made up."""

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
    """Answers who shows `wanted` headers, over TLS where there is an authority."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.context: ssl.SSLContext | None = None
        self.wanted: dict[str, str] = {}
        self.refusal = 401
        self.redirect = ""
        self.seen: list[Mapping[str, str]] = []

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
        """That a client hangs up is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        gateway = self.server
        gateway.seen.append(dict(self.headers))
        admitted = all(self.headers.get(name) == value for name, value in gateway.wanted.items())
        self.send_response(302 if gateway.redirect else 200 if admitted else gateway.refusal)
        if gateway.redirect:
            self.send_header("Location", gateway.redirect)
        self.end_headers()
        answer = {"status": "success", "data": {"result": []}} if admitted else {"you sent": self.said()}
        self.wfile.write(json.dumps(answer, ensure_ascii=False).encode())

    def said(self) -> list[str]:
        """Headers, and what is behind a name and a password."""
        kind, _, value = self.headers.get("Authorization", "").partition(" ")
        return [*self.headers.values(), base64.b64decode(value).decode() if kind == "Basic" else ""]

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    yield from served()


@pytest.fixture
def elsewhere() -> Iterator[Gateway]:
    yield from served()


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    with run_prometheus(folder, "127.0.0.1:9", users={"pacekeeper": BCRYPT}) as url:
        ready = f"{url}/-/ready"
        wait_until_true(
            lambda: requests.get(ready, auth=("pacekeeper", PASSWORD), timeout=60).ok, "Prometheus is ready"
        )
        yield url


def served() -> Iterator[Gateway]:
    with Gateway() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def mount(folder: Path, **keys: str | bytes) -> Path:
    """As the kubelet does: all files change at once. Underlines are dots."""
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


def authority(folder: Path) -> Authority:
    folder.mkdir()
    return Authority(folder)


async def test_a_bearer_token_an_authority_and_headers(gateway: Gateway, tmp_path: Path) -> None:
    ours = authority(tmp_path / "ca")
    gateway.context = ours.server_context()
    gateway.wanted = {"Authorization": f"Bearer {TOKEN}", **dict(HEADERS)}
    folder = mount(tmp_path / "secret", token=f"{TOKEN}\n", ca_crt=ours.pem)
    assert await create_http_query(gateway.url, folder, HEADERS)("up", 3.0) == []
    sample = await PrometheusClient(gateway.url, "gpus", "", create_http_query(gateway.url, folder, HEADERS)).sample(
        1.0
    )
    assert not sample.error


async def test_a_name_and_a_password_of_any_language(gateway: Gateway, tmp_path: Path) -> None:
    wanted = base64.b64encode("jürgen:pass:wörd ✓".encode()).decode()
    gateway.wanted = {"Authorization": f"Basic {wanted}"}
    folder = mount(tmp_path / "secret", username="jürgen\n", password="pass:wörd ✓\n")
    assert await create_http_query(gateway.url, folder)("up", 3.0) == []


async def test_a_client_certificate(gateway: Gateway, tmp_path: Path) -> None:
    ours, clients = authority(tmp_path / "ca"), authority(tmp_path / "clients")
    gateway.context = ours.server_context()
    gateway.context.verify_mode = ssl.CERT_REQUIRED
    gateway.context.load_verify_locations(cadata=clients.pem)
    key = (tmp_path / "clients/server.key").read_bytes()
    folder = mount(tmp_path / "secret", ca_crt=ours.pem, tls_crt=clients.pem, tls_key=key)
    assert await create_http_query(gateway.url, folder)("up", 3.0) == []
    without = create_http_query(gateway.url, mount(tmp_path / "without", ca_crt=ours.pem))
    with pytest.raises(RequestException):
        await without("up", 3.0)


async def test_renewed_credentials_count_at_the_next_question(gateway: Gateway, tmp_path: Path) -> None:
    old, new = authority(tmp_path / "old"), authority(tmp_path / "new")
    gateway.context = old.server_context()
    gateway.wanted = {"Authorization": f"Bearer {TOKEN}"}
    folder = mount(tmp_path / "secret", token=TOKEN, ca_crt=old.pem)
    ask = create_http_query(gateway.url, folder)
    await ask("up", 3.0)
    gateway.context, gateway.wanted = new.server_context(), {"Authorization": "Bearer next"}
    with pytest.raises(PrometheusAccessDenied, match=r"certificate verify failed.*check ca\.crt"):
        await ask("up", 3.0)
    mount(folder, token=TOKEN, ca_crt=new.pem)
    with pytest.raises(PrometheusAccessDenied, match="HTTP 401"):
        await ask("up", 3.0)
    mount(folder, token="next", ca_crt=new.pem)
    assert await ask("up", 3.0) == []


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_says_what_to_do_and_shows_no_secret(gateway: Gateway, tmp_path: Path, status: int) -> None:
    gateway.wanted, gateway.refusal = {"Authorization": "Bearer another"}, status
    ask = create_http_query(gateway.url, mount(tmp_path / "secret", token=TOKEN), HEADERS)
    sample = await PrometheusClient(gateway.url, "gpus", "", ask).sample(1.0)
    assert sample.access_denied
    assert sample.get_metrics("ns", "j").prometheus_denied
    assert f"refuses the operator (HTTP {status})" in sample.error
    assert "prometheus.secretName" in sample.error
    rates = await PrometheusClient(gateway.url, "", "", ask).read_link_rates("up")
    assert f"HTTP {status}" in rates.error
    for secret in (TOKEN, "k3y9"):
        assert secret not in sample.error + rates.error


@pytest.mark.parametrize(
    ("password", "reason"), [(PASSWORD, Reason.PROMETHEUS_AVAILABLE), ("sesame", Reason.PROMETHEUS_ACCESS_DENIED)]
)
async def test_a_prometheus_that_asks_for_a_password(
    protected: str, tmp_path: Path, password: str, reason: Reason
) -> None:
    """A real one; what it answers is the job's condition."""
    folder = mount(tmp_path / "secret", username="pacekeeper", password=password)
    sample = await PrometheusClient(protected, "gpus", "", create_http_query(protected, folder)).sample(1.0)
    world = replace(build_training(), metrics=sample.get_metrics("ns", "j"))
    conditions = build_job_status(world, build_policy(), JobStatus()).conditions
    condition = next(one for one in conditions if one.type == JobCondition.METRICS_AVAILABLE)
    assert condition.reason == reason
    assert password not in condition.message


@pytest.mark.parametrize("keys", [{"token": TOKEN}, {"username": "mé", "password": "s3crèt"}], ids=str)
async def test_an_answer_that_repeats_the_credentials_is_not_repeated(
    gateway: Gateway, tmp_path: Path, keys: dict[str, str]
) -> None:
    """A Fabric's status shows what its query was answered with."""
    gateway.wanted, gateway.refusal = {"Authorization": "Bearer another"}, 400
    ask = create_http_query(gateway.url, mount(tmp_path / "secret", **keys), HEADERS)
    rates = await PrometheusClient(gateway.url, "", "", ask).read_link_rates("up")
    assert "you sent" in rates.error
    for secret in (TOKEN, "k3y9", "s3cr", base64.b64encode("mé:s3crèt".encode()).decode()):
        assert secret not in rates.error


async def test_credentials_do_not_follow_a_redirect(gateway: Gateway, elsewhere: Gateway, tmp_path: Path) -> None:
    gateway.redirect = f"{elsewhere.url}/login?next=1"
    ask = create_http_query(gateway.url, mount(tmp_path / "secret", token=TOKEN), HEADERS)
    with pytest.raises(PrometheusAccessDenied, match="redirects the operator to localhost; redirects are not followed"):
        await ask("up", 3.0)
    assert len(gateway.seen) == 1
    assert not elsewhere.seen


@pytest.mark.parametrize(
    ("keys", "words"),
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
async def test_a_secret_that_can_be_none_is_said_and_not_sent(
    gateway: Gateway, tmp_path: Path, keys: dict[str, str], words: str
) -> None:
    with pytest.raises(PrometheusAccessDenied, match=words) as refused:
        await create_http_query(gateway.url, mount(tmp_path / "secret", **keys))("up", 3.0)
    assert not any(str(value) in str(refused.value) for value in keys.values() if len(value) > 1)
    assert not gateway.seen


@pytest.mark.parametrize("key", ["ca_crt", "tls_crt"])
async def test_no_certificate_at_all(gateway: Gateway, tmp_path: Path, key: str) -> None:
    ours = authority(tmp_path / "ca")
    gateway.context = ours.server_context()
    keys = {"ca_crt": ours.pem, key: "nonsense"} | ({"tls_key": "nonsense"} if key == "tls_crt" else {})
    ask = create_http_query(gateway.url, mount(tmp_path / "secret", **keys))
    sample = await PrometheusClient(gateway.url, "gpus", "", ask).sample(1.0)
    assert sample.error, "whatever it is, the operator goes on"


async def test_files_that_go_while_they_are_read_cost_one_answer(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = authority(tmp_path / "ca")
    gateway.context = ours.server_context()
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

    def test_from_the_environment(self) -> None:
        settings = Settings.from_environment(self.GIVEN)
        assert settings.prometheus_headers == (("X-Scope-OrgID", "a|b"),)
        assert settings.prometheus_matchers == ('cluster="a"', r'region =~ "eu-.*|\"x\\."')

    @pytest.mark.parametrize("asked", [build_query, build_gpu_signs_query])
    def test_matchers_stand_in_every_selector(self, asked: Any) -> None:
        plain, text = asked("gpus"), asked("gpus", ('cluster="a"',))
        assert len(re.findall(r"\{[a-z_]", text)) == text.count('cluster="a"') > 0
        assert text.replace(',cluster="a"', "") == plain

    @pytest.mark.parametrize(
        ("name", "text", "words"),
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
    def test_a_bad_value_is_named_and_secrets_are_not_shown(self, name: str, text: str, words: str) -> None:
        with pytest.raises(InputError, match=words) as refused:
            Settings.from_environment({f"PACEKEEPER_PROMETHEUS_{name}": text})
        assert str(refused.value).startswith(f"PACEKEEPER_PROMETHEUS_{name}: ")
        assert "s3cret" not in str(refused.value)
