"""The injection at run time: its state in the ConfigMap, and the breaker."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from pacekeeper_analysis.protocol.watched_container import STACK_SIGNAL_NUMBER
from pacekeeper_operator import metrics
from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.names import LABEL_WATCH, LABEL_WATCHED, WATCH_CONFIG_MAP
from pacekeeper_operator.decide.injection_breaker import BLOCKED_POD_SECONDS, InjectionFailure
from pacekeeper_operator.kube.client import Denied
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.services.watch_injection import WATCH_CHECK_INTERVAL_SECONDS, WatchInjection
from pacekeeper_operator.services.watched_jobs import WatchedJobs
from pacekeeper_operator.settings import Settings, WatchMode
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.injection_cases import RULES, build_pod, use_gpus
from testing.operators.virtual_time import Timeline, VirtualRuntime

SYSTEM = "pacekeeper-system"
CREATED = "2027-01-15T08:00:00Z"  # when the virtual clock starts
LATER = "2027-01-15T09:00:00Z"
BACK_OFF = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
JOB = {"metadata": {"namespace": "team", "name": "gpt"}, "spec": {"backoffLimit": 3}}


STATE = ("configmaps", SYSTEM, WATCH_CONFIG_MAP)
BINDINGS = ("pacekeeper-watch", "pacekeeper-watch-pods")


class InjectionBench:
    def __init__(self, mode: WatchMode = WatchMode.POLICY, *, pre_pull: bool = False) -> None:
        self.cluster, self.timeline, self.authority = FakeCluster(), Timeline(), "CA-1"
        self.settings = Settings(watch_mode=mode, watch_rules=RULES, watch_pre_pull=pre_pull)
        self.start_leader()
        self.create_bindings()
        self.put("jobs", JOB)

    def start_leader(self) -> None:
        """Have an operator lead that has no memory of an earlier one."""
        runtime = VirtualRuntime(self.timeline)
        self.watched = WatchedJobs(self.settings, self.cluster, runtime, JobRegistry(0.0))
        self.injection = WatchInjection(self.cluster, self.settings, runtime, lambda: self.authority, self.watched)

    def create_bindings(self) -> None:
        """As an installation does, and an upgrade with --force."""
        for name in BINDINGS:
            self.put("mutatingadmissionpolicybindings", {"metadata": {"name": name}, "spec": {"policyName": name}})

    @property
    def is_open(self) -> bool:
        """Whether the bindings select pods."""
        specs = [self.cluster.objects["mutatingadmissionpolicybindings", "", name]["spec"] for name in BINDINGS]
        (is_open,) = {not (spec.get("matchResources") or {}).get("excludeResourceRules") for spec in specs}
        return is_open

    def put(self, plural: str, body: dict[str, Any]) -> None:
        metadata = {"resourceVersion": "1", **body["metadata"]}
        self.cluster.objects[plural, metadata.get("namespace", ""), metadata["name"]] = {**body, "metadata": metadata}

    def put_pod(self, name: str, status: dict[str, Any], created: str = CREATED, *, watched: bool = True) -> None:
        pod = build_pod(use_gpus())
        pod["metadata"] |= {"namespace": "team", "name": name, "uid": f"uid-{name}", "creationTimestamp": created}
        pod["metadata"]["ownerReferences"][0]["uid"] = f"uid-job-{name}"
        pod["metadata"]["labels"] = {LABEL_WATCHED: "true"} if watched else {}
        self.put("pods", {**pod, "status": status})

    def block_pod(self, name: str = "gpt-0", created: str = CREATED) -> None:
        blocked = [{"name": "pacekeeper-payload", "state": BACK_OFF}]
        self.put_pod(name, {"phase": "Pending", "initContainerStatuses": blocked}, created)

    async def run_for(self, seconds: float) -> None:
        """Run passes as `supervise` does."""
        for _ in range(int(seconds / WATCH_CHECK_INTERVAL_SECONDS)):
            await self.injection.check_once()
            self.timeline.now += WATCH_CHECK_INTERVAL_SECONDS

    @property
    def data(self) -> dict[str, str]:
        return dict(self.cluster.objects[STATE].get("data") or {})

    @property
    def pods(self) -> set[str]:
        return {name for plural, _, name in self.cluster.objects if plural == "pods"}

    @property
    def events(self) -> list[str]:
        return [body["reason"] for (plural, _, _), body in self.cluster.objects.items() if plural == "events"]

    def switch_on(self) -> None:
        self.cluster.objects[STATE]["data"]["enabled"] = "true"


async def test_the_leader_enables_it_once_and_renews_the_authority() -> None:
    bench = InjectionBench()
    assert bench.injection.get_injection() is None
    await bench.run_for(5)
    assert bench.data == {"enabled": "true", "ca.crt": "CA-1"}
    injection = bench.injection.get_injection()
    assert injection is not None
    assert injection.operator.authority == "CA-1"
    bench.authority = "CA-2"
    bench.cluster.objects["configmaps", SYSTEM, WATCH_CONFIG_MAP]["data"]["enabled"] = "false"
    await bench.run_for(5)
    assert bench.data == {"enabled": "false", "ca.crt": "CA-2"}, "what a person has decided stays"
    assert bench.injection.get_injection() is None


async def test_without_its_config_map_or_bindings_nothing_fails() -> None:
    bench = InjectionBench()
    bench.cluster.objects.clear()
    await bench.injection._read_state()
    assert bench.injection.get_injection() is None
    await bench.run_for(5)
    assert bench.data == {"enabled": "true", "ca.crt": "CA-1"}


async def test_each_pass_sets_the_gate_to_what_the_state_requires() -> None:
    bench = InjectionBench()
    await bench.run_for(5)
    assert bench.is_open
    bench.block_pod()
    await bench.run_for(60)
    assert not bench.is_open
    version = bench.cluster.version
    await bench.run_for(60)
    assert bench.cluster.version == version, "nothing is written twice"
    bench.create_bindings()
    bench.start_leader()
    await bench.run_for(5)
    assert not bench.is_open, "neither an upgrade nor another leader switches it on"
    bench.switch_on()
    await bench.run_for(5)
    assert bench.is_open


async def test_a_leader_that_dies_before_it_closes_the_gate_leaves_that_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = InjectionBench()
    await bench.run_for(5)

    async def die() -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(bench.injection, "_set_gate", die)
    with pytest.raises(asyncio.CancelledError):
        await bench.injection.stop_for_library(InjectionFailure("rank 3 has failed"), bench.injection.runtime.now())
    assert (bench.data["enabled"], bench.is_open) == ("false", True)
    bench.start_leader()
    await bench.run_for(5)
    assert (bench.data["reason"], bench.is_open) == ("rank 3 has failed", False)


async def test_pods_are_watched_once_their_image_is_on_the_nodes() -> None:
    bench = InjectionBench(pre_pull=True)
    status = {"observedGeneration": 1, "updatedNumberScheduled": 2, "desiredNumberScheduled": 2, "numberReady": 1}
    metadata = {"name": "pacekeeper-watch-image", "namespace": SYSTEM, "generation": 1, "uid": "u"}
    bench.put("daemonsets", {"metadata": metadata, "status": status})
    await bench.run_for(30)
    assert "enabled" not in bench.data
    assert not bench.is_open
    assert bench.watched.injection_stop == "1 of 2 nodes have its image, and the others pull it"
    bench.put("daemonsets", {"metadata": metadata, "status": {**status, "numberReady": 2}})
    await bench.run_for(5)
    assert bench.data == {"enabled": "true", "ca.crt": "CA-1", "pulled": "u/1"}
    assert bench.is_open
    assert bench.watched.injection_stop is None
    bench.put("daemonsets", {"metadata": metadata, "status": status})
    bench.start_leader()
    await bench.run_for(5)
    assert bench.is_open, "a node that fails later does not count"
    new = {"metadata": {**metadata, "generation": 2}, "status": {**status, "observedGeneration": 2}}
    bench.put("daemonsets", new)
    await bench.run_for(5)
    assert not bench.is_open, "another image"
    assert bench.data["enabled"] == "true"


async def test_a_failure_of_the_library_switches_it_off_unless_the_pod_is_from_before() -> None:
    bench = InjectionBench()
    await bench.run_for(5)
    stop = bench.watched.on_library_failure
    assert stop is not None
    now = bench.injection.runtime.now()
    await stop(InjectionFailure("rank 3 has failed"), now)
    assert (bench.data["enabled"], bench.data["reason"], bench.is_open) == ("false", "rank 3 has failed", False)
    bench.switch_on()
    await stop(InjectionFailure("again"), now)
    assert bench.data["enabled"] == "true"
    await stop(InjectionFailure("again"), now + 60)
    assert bench.data["reason"] == "again"


async def test_a_gate_that_cannot_be_set_does_not_keep_the_breaker_from_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = InjectionBench()

    async def deny(*_: object, **__: object) -> None:
        raise Denied("forbidden")

    monkeypatch.setattr(bench.injection, "_set_binding", deny)
    bench.block_pod()
    await bench.run_for(60)
    assert bench.data["enabled"] == "false"
    assert bench.pods == set()


async def test_the_webhooks_configuration_gets_the_authority_and_keeps_it() -> None:
    bench = InjectionBench(WatchMode.WEBHOOK)
    webhooks = [{"name": "a", "clientConfig": {"service": {}}}, {"name": "b", "clientConfig": {}}]
    bench.put("mutatingwebhookconfigurations", {"metadata": {"name": "pacekeeper-watch"}, "webhooks": webhooks})
    bench.put("configmaps", {"metadata": {"namespace": SYSTEM, "name": WATCH_CONFIG_MAP}, "data": {"enabled": "true"}})
    await bench.run_for(5)
    key = ("mutatingwebhookconfigurations", "", "pacekeeper-watch")
    bundles = [webhook["clientConfig"]["caBundle"] for webhook in bench.cluster.objects[key]["webhooks"]]
    assert bundles == [base64.b64encode(b"CA-1").decode()] * 2
    version = bench.cluster.version
    await bench.run_for(10)
    assert bench.cluster.version == version, "nothing is written twice"
    bench.cluster.objects[STATE]["data"]["enabled"] = "false"
    await bench.run_for(5)
    assert all(webhook["matchConditions"] for webhook in bench.cluster.objects[key]["webhooks"])


async def test_a_blocked_pod_switches_it_off_within_a_minute_and_is_replaced() -> None:
    bench = InjectionBench()
    bench.block_pod()
    await bench.run_for(BLOCKED_POD_SECONDS)
    assert bench.data["enabled"] == "true"
    assert bench.pods == {"gpt-0"}
    await bench.run_for(60 - BLOCKED_POD_SECONDS)
    assert bench.data["enabled"] == "false"
    assert "pacekeeper-payload: ErrImagePull: no such image" in bench.data["reason"]
    assert metrics.WATCH_SWITCHED_OFF._value.get() == 1
    assert metrics.WATCH_INJECTED._value.get() == 0
    assert bench.pods == set()
    assert sorted(bench.events) == ["WatchBlocksPod", "WatchSwitchedOff"]
    await bench.run_for(60)
    assert bench.data["enabled"] == "false"


async def test_a_pod_that_an_api_server_still_injects_after_the_switch_off_stays() -> None:
    """Its deletion would only cost the Job another pod."""
    bench = InjectionBench()
    bench.block_pod()
    await bench.run_for(60)
    assert bench.pods == set()
    bench.block_pod(created=format_time(bench.injection.runtime.now() + 1))
    await bench.run_for(120)
    assert bench.pods == {"gpt-0"}


async def test_a_pod_stays_whose_deletion_would_fail_its_job() -> None:
    bench = InjectionBench()
    bench.put("jobs", {**JOB, "spec": {"backoffLimit": 0}})
    bench.block_pod()
    await bench.run_for(120)
    assert bench.data["enabled"] == "false"
    assert bench.pods == {"gpt-0"}
    assert sorted(bench.events) == ["WatchBlocksPod", "WatchSwitchedOff"], "it is reported once"


async def test_once_a_person_has_switched_it_on_only_new_pods_count() -> None:
    bench = InjectionBench()
    bench.put("jobs", {**JOB, "spec": {"backoffLimit": 0}})
    bench.block_pod()
    await bench.run_for(60)
    bench.switch_on()
    await bench.run_for(60)
    assert bench.data["enabled"] == "true", "the pod is from before"
    assert "reason" not in bench.data
    assert metrics.WATCH_SWITCHED_OFF._value.get() == 0
    bench.block_pod("gpt-1", LATER)
    await bench.run_for(60)
    assert bench.data["enabled"] == "false"


async def test_denials_count_where_pods_are_watched() -> None:
    bench = InjectionBench()
    bench.put("namespaces", {"metadata": {"name": "team", "labels": {LABEL_WATCH: "enabled"}}})
    note = "minimum memory usage per Container is 32Mi, but request is 16Mi"
    regarding = {"kind": "Job", "namespace": "other", "name": "gpt"}
    event = {"reason": "FailedCreate", "note": note, "eventTime": CREATED, "regarding": regarding}
    bench.put("events", {"metadata": {"namespace": "other", "name": "e1"}, **event})
    await bench.run_for(5)
    assert bench.data["enabled"] == "true"
    regarding = {**regarding, "namespace": "team"}
    bench.put("events", {"metadata": {"namespace": "team", "name": "e2"}, **event, "regarding": regarding})
    await bench.run_for(5)
    assert bench.data["enabled"] == "false"
    assert "Job team/gpt cannot create a pod" in bench.data["reason"]


async def test_a_container_that_the_signal_for_stacks_has_ended_switches_it_off() -> None:
    bench = InjectionBench()
    code = {"terminated": {"exitCode": 128 + STACK_SIGNAL_NUMBER}}
    bench.put_pod("w", {"phase": "Failed", "containerStatuses": [{"name": "a", "state": code}]})
    await bench.run_for(5)
    assert "signal 44" in bench.data["reason"]


@pytest.mark.parametrize("others_fail", [False, True])
async def test_watched_jobs_are_compared_with_others(others_fail: bool) -> None:
    bench = InjectionBench()
    failed = {"phase": "Failed", "containerStatuses": [{"name": "a", "state": {"terminated": {"exitCode": 139}}}]}
    for i in range(6):
        bench.put_pod(f"w{i}", failed)
    for i in range(20):
        bench.put_pod(f"o{i}", failed if others_fail else {"phase": "Succeeded"}, watched=False)
    await bench.run_for(5)
    assert bench.data["enabled"] == ("true" if others_fail else "false")
