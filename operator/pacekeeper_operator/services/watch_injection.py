"""The injection of the watch at run time: whether it is on, what sidecars trust, and its breaker.

The ConfigMap `pacekeeper-watch` holds the state. The policy reads it for each pod, and each operator reads it for the
webhook. The leader creates it, so that no upgrade of the chart resets it. It writes the authority, and `enabled:
"true"` once, when the key is missing. If the injection blocks pods or makes jobs fail, it writes `enabled: "false"`;
only a person writes "true" again.

Each pass also sets the gate to what the state requires: in the policy's bindings, or in the webhook's configuration.
The state is written first. So a leader that dies in between leaves the rest to the next one.

Nothing depends on this loop: without an operator the state stays as it is, and pods start.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import kopf

from .. import metrics
from ..api.formats import format_time, parse_time
from ..api.names import LABEL_JOB, LABEL_WATCHED, WATCH_CONFIG_MAP, Object
from ..async_runtime import OperatorRuntime
from ..decide.injection_breaker import (
    API_SERVER_DELAY_SECONDS,
    BLOCKED_POD_SECONDS,
    BlockedPod,
    InjectionFailure,
    JobOutcome,
    can_replace_pod,
    find_blocking_failure,
    find_denial_failure,
    find_excess_failure,
    find_signal_failure,
    find_suspicious_failures,
    list_blocked_pods,
    read_outcome,
)
from ..decide.injection_gate import ImagePull, build_binding_patch, build_webhook_patch
from ..endpoint.admission_webhook import Injection
from ..kube.client import (
    CONFIG_MAPS,
    DAEMON_SETS,
    EVENTS,
    JOBS,
    MUTATING_POLICY_BINDINGS,
    MUTATING_WEBHOOKS,
    NAMESPACES,
    PODS,
    Cluster,
    NotFound,
    ResourceKind,
)
from ..pods.injection import InjectionRules, OperatorAddress, find_injection_refusal
from ..settings import Settings, WatchMode
from .events import emit_event
from .watched_jobs import WatchedJobs

WATCH_CHECK_INTERVAL_SECONDS = 5.0
"""With BLOCKED_POD_SECONDS it leaves time for the calls within the minute after which the injection has to be off."""
OUTCOME_CHECK_INTERVAL_SECONDS = 30.0
"""Jobs fail more slowly than pods are blocked, and the check lists all pods that have ended."""
MAX_SWITCH_OFF_REASON_CHARACTERS = 1000
UNSTARTED_PODS = "status.phase!=Running,status.phase!=Succeeded"
ENDED_PODS = "status.phase!=Running,status.phase!=Pending,status.phase!=Unknown"
Read = TypeVar("Read")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WatchState:
    """The content of the ConfigMap."""

    enabled: str = ""  # true, false; "": not decided yet
    authority: str = ""
    disabled_at: float = 0.0  # when the breaker switched it off the last time; 0: never
    reason: str = ""  # why the breaker has switched it off
    pulled: str = ""  # version of the DaemonSet that has pulled the image
    exists: bool = True

    @classmethod
    def from_config_map(cls, config_map: Object | None) -> WatchState:
        """Read the state. None: there is no ConfigMap, so that no pod is watched."""
        data = (config_map or {}).get("data") or {}
        try:
            disabled_at = parse_time(data["disabledAt"]) if data.get("disabledAt") else 0.0
        except ValueError:  # a person has edited it
            disabled_at = 0.0
        enabled, authority, reason = data.get("enabled", ""), data.get("ca.crt", ""), data.get("reason", "")
        return cls(enabled, authority, disabled_at, reason, data.get("pulled", ""), config_map is not None)

    @property
    def is_on(self) -> bool:
        return self.enabled == "true" and bool(self.authority)


@dataclass
class WatchInjection:
    """The injection as this operator knows it. `rules` None: it is not configured."""

    cluster: Cluster
    settings: Settings
    runtime: OperatorRuntime
    get_authority: Callable[[], str]
    """Returns what sidecars trust (PEM)."""
    watched: WatchedJobs
    state: WatchState = field(default_factory=WatchState)
    _first_seen: dict[tuple[str, str], float] = field(default_factory=dict)  # by pod UID and container, monotonic
    _reported: set[str] = field(default_factory=set)  # UIDs of pods with an Event
    _outcomes_at: float | None = None  # last check of outcomes, monotonic
    _pending_pull: ImagePull | None = None  # None: pods need not wait for their image
    _pull_since: tuple[str, float] = ("", 0.0)  # key of the pull that is waited for, and since when (monotonic)

    def __post_init__(self) -> None:
        if self.settings.watch_rules is not None:
            self.watched.on_library_failure = self.stop_for_library

    def get_injection(self) -> Injection | None:
        """Return what the webhook injects."""
        rules = self.settings.watch_rules
        if rules is None or not self.state.is_on:
            return None
        return Injection(rules, OperatorAddress(self.settings.endpoint, self.state.authority))

    async def follow(self) -> None:
        """Read the state periodically, for the webhook of an operator that does not lead, until cancelled."""
        while True:
            try:
                await self._read_state()
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("it cannot be read whether pods are watched; retrying: %s", error)
            await self.runtime.sleep(WATCH_CHECK_INTERVAL_SECONDS)

    async def supervise(self) -> None:
        """Write what is missing, and run the breaker, until cancelled. Only the leader does so."""
        while True:
            try:
                await self.check_once()
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("the check of the injection failed; retrying: %s", error)
            await self.runtime.sleep(WATCH_CHECK_INTERVAL_SECONDS)

    async def check_once(self) -> None:
        """Run one pass. Raises the errors of the cluster client."""
        rules = self.settings.watch_rules
        if rules is None:
            return
        await self._read_state()
        await self._check_pull()
        await self._complete_state()
        await self._set_gate()
        blocked = await self._track_blocked_pods()
        if self.state.is_on:
            failure = find_blocking_failure(
                {pod: since for pod, (since, created) in blocked.items() if created > self.state.disabled_at},
                self.runtime.monotonic(),
            )
            failure = failure or await self._find_denial(rules) or await self._find_excess(rules)
            if failure is not None:
                await self._switch_off(failure)
        await self._release_pods(blocked)

    async def stop_for_library(self, failure: InjectionFailure, created_at: float) -> None:
        """Switch the injection off because of a rank of a pod that was created at `created_at`.

        Seconds since the epoch. Raises the errors of the cluster client.
        """
        await self._read_state()
        if self.state.is_on and created_at > self.state.disabled_at:
            await self._switch_off(failure)

    async def _read_state(self) -> None:
        self._take_state(await self.cluster.find(CONFIG_MAPS, WATCH_CONFIG_MAP, self.settings.namespace))

    def _take_state(self, config_map: Object | None) -> None:
        self.state = WatchState.from_config_map(config_map)
        metrics.WATCH_INJECTED.set(self.state.is_on)
        metrics.WATCH_SWITCHED_OFF.set(self.state.enabled == "false" and bool(self.state.reason))

    async def _check_pull(self) -> None:
        """Check whether nodes still pull the image. A node that comes later pulls it by its first pod, if need be."""
        self._pending_pull = None
        if not self.settings.watch_pre_pull:
            return
        name = f"{self.settings.service_name}-watch-image"
        daemon_set = await self.cluster.find(DAEMON_SETS, name, self.settings.namespace)
        if daemon_set is None:  # it only saves time
            return
        pull, now = ImagePull.from_daemon_set(daemon_set), self.runtime.monotonic()
        if pull.key == self.state.pulled:
            return
        if self._pull_since[0] != pull.key:
            self._pull_since = pull.key, now
        if not pull.is_over(now - self._pull_since[1]):
            self._pending_pull = pull
            return
        log.info("%d of %d nodes have the image of the watch", pull.ready, pull.nodes)
        await self._write_state({"pulled": pull.key})

    async def _complete_state(self) -> None:
        """Write the authority if it has changed, and enable the injection if that was never decided."""
        changes: dict[str, str | None] = {}
        if self.state.authority != self.get_authority():
            changes["ca.crt"] = self.get_authority()
        if not self.state.enabled and self._pending_pull is None:
            changes["enabled"] = "true"
        if self.state.enabled == "true" and self.state.reason:  # a person has switched it on again
            changes["reason"] = None
        if changes:
            await self._write_state(changes)

    async def _write_state(self, changes: Mapping[str, str | None]) -> None:
        metadata = {"name": WATCH_CONFIG_MAP, "namespace": self.settings.namespace}
        if self.state.exists:
            patch = {"data": dict(changes)}
            written = await self.cluster.patch(CONFIG_MAPS, WATCH_CONFIG_MAP, patch, self.settings.namespace)
        else:
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(changes)}
            written = await self.cluster.create(CONFIG_MAPS, body)
        self._take_state(written)

    async def _set_gate(self) -> None:
        """Open or close what selects pods. An error is logged: the state alone stops most API servers, too."""
        is_open, name = self.state.is_on and self._pending_pull is None, f"{self.settings.service_name}-watch"
        metrics.WATCH_INJECTED.set(is_open)
        self.watched.injection_stop = self._describe_stop()
        try:
            if self.settings.watch_mode is WatchMode.WEBHOOK:
                await self._set_webhooks(name, is_open=is_open)
            else:
                for binding in (name, f"{name}-pods"):
                    await self._set_binding(binding, is_open=is_open)
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            wanted = "watched" if is_open else "left as they are"
            log.warning("it could not be set that new pods are %s; retrying: %s", wanted, error)

    async def _set_binding(self, name: str, *, is_open: bool) -> None:
        binding = await self.cluster.get(MUTATING_POLICY_BINDINGS, name)
        patch = build_binding_patch(binding, is_open=is_open)
        if patch is not None:
            await self.cluster.patch(MUTATING_POLICY_BINDINGS, name, patch)

    async def _set_webhooks(self, name: str, *, is_open: bool) -> None:
        bundle = base64.b64encode(self.get_authority().encode()).decode()
        configuration = await self.cluster.get(MUTATING_WEBHOOKS, name)
        patch = build_webhook_patch(configuration, bundle, is_open=is_open)
        if patch is not None:
            await self.cluster.patch(MUTATING_WEBHOOKS, name, patch)

    def _describe_stop(self) -> str | None:
        """Return why new pods are not watched; None: they are."""
        if self.state.enabled == "false":
            return self.state.reason or "a person has switched the watch off"
        pull = self._pending_pull
        return None if pull is None else f"{pull.ready} of {pull.nodes} nodes have its image, and the others pull it"

    async def _track_blocked_pods(self) -> dict[BlockedPod, tuple[float, float]]:
        """Return the blocked pods: since when (monotonic), and when they were created (seconds since the epoch)."""

        def read(pod: Object) -> list[tuple[BlockedPod, float]]:
            return [(found, _get_creation_time(pod)) for found in list_blocked_pods([pod])]

        found = await self._collect(PODS, read, labels=f"{LABEL_WATCHED}=true", fields=UNSTARTED_PODS)
        now = self.runtime.monotonic()
        self._first_seen = {
            (pod.uid, pod.container): self._first_seen.get((pod.uid, pod.container), now) for pod, _ in found
        }
        self._reported &= {pod.uid for pod, _ in found}
        metrics.WATCH_BLOCKED_PODS.set(len(found))
        return {pod: (self._first_seen[pod.uid, pod.container], created) for pod, created in found}

    async def _find_denial(self, rules: InjectionRules) -> InjectionFailure | None:
        events = await self._collect(EVENTS, lambda event: [event], fields="reason=FailedCreate")
        if not events:
            return None
        watched = await self.cluster.collect(
            NAMESPACES, lambda found: str(found["metadata"]["name"]), labels=rules.namespaces
        )
        return find_denial_failure(events, rules.resources, self.state.disabled_at, set(watched).__contains__)

    async def _find_excess(self, rules: InjectionRules) -> InjectionFailure | None:
        """Compare how watched jobs and others have ended. Others are listed only if watched jobs have failed alike."""
        now = self.runtime.monotonic()
        if self._outcomes_at is not None and now - self._outcomes_at < OUTCOME_CHECK_INTERVAL_SECONDS:
            return None
        self._outcomes_at = now
        read_watched = partial(self._read_outcomes, rules, is_watched=True)
        outcomes = await self._collect(PODS, read_watched, labels=f"{LABEL_WATCHED}=true", fields=ENDED_PODS)
        if failure := find_signal_failure(outcomes):
            return failure
        if not find_suspicious_failures(outcomes):
            return None
        read_others = partial(self._read_outcomes, rules, is_watched=False)
        others = await self._collect(PODS, read_others, labels=f"!{LABEL_WATCHED},!{LABEL_JOB}", fields=ENDED_PODS)
        return find_excess_failure([*outcomes, *others])

    def _read_outcomes(self, rules: InjectionRules, pod: Object, *, is_watched: bool) -> list[JobOutcome]:
        """Return the pod's outcome, if it counts: pods are compared with those that could be watched."""
        if _get_creation_time(pod) <= self.state.disabled_at and is_watched:
            return []
        if not is_watched and find_injection_refusal(pod, rules) is not None:
            return []
        outcome = read_outcome(pod, is_watched)
        return [] if outcome is None else [outcome]

    async def _switch_off(self, failure: InjectionFailure) -> None:
        """Write the state first: the next leader does the rest if this one dies."""
        await self._write_state(
            {
                "enabled": "false",
                "reason": failure.message[:MAX_SWITCH_OFF_REASON_CHARACTERS],
                "disabledAt": format_time(self.runtime.now()),
            }
        )
        await self._set_gate()
        log.error(
            "pods are no longer watched: %s; remove the cause, then switch the watch on again: kubectl pacekeeper "
            "injection on --operator-namespace %s",
            *(failure.message, self.settings.namespace),
        )
        regarding = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "namespace": self.settings.namespace,
            "name": WATCH_CONFIG_MAP,
        }
        note = f"Pods are no longer watched: {failure.message}"
        await emit_event(self.cluster, self.runtime, regarding, "WatchSwitchedOff", note, "SwitchOff", warning=True)

    async def _release_pods(self, blocked: dict[BlockedPod, tuple[float, float]]) -> None:
        """Delete blocked pods where their controller creates them again, and report the others once.

        A pod that was created later than API servers need to learn of the switch-off is not deleted. One that still
        injects the watch would inject it into the next pod, too, and the Job would fail by its lost pods.
        """
        now = self.runtime.monotonic()
        for pod, (since, created) in blocked.items():
            if pod.has_failed or now - since < BLOCKED_POD_SECONDS or self.state.is_on:
                continue
            is_from_before = created <= self.state.disabled_at + API_SERVER_DELAY_SECONDS
            is_replaced = is_from_before and await self._is_replaced(pod)
            if not is_replaced and pod.uid in self._reported:
                continue
            self._reported.add(pod.uid)
            regarding = {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": pod.namespace,
                "name": pod.name,
                "uid": pod.uid,
            }
            effect = (
                "Pacekeeper deletes the pod, and its Job creates it again without the watch"
                if is_replaced
                else "delete the pod if its controller creates it again; new pods are not watched"
            )
            note = f"Container {pod.container} of the watch cannot start ({pod.reason}): {effect}"
            action = "DeletePod" if is_replaced else "SwitchOff"
            await emit_event(self.cluster, self.runtime, regarding, "WatchBlocksPod", note, action, warning=True)
            if is_replaced:
                await self.cluster.delete(PODS, pod.name, pod.namespace, uid=pod.uid)

    async def _is_replaced(self, pod: BlockedPod) -> bool:
        """Return whether the pod's Job creates it again, and does not fail by its deletion."""
        kind, name = pod.controller
        if kind != "Job":
            return False
        try:
            job = await self.cluster.get(JOBS, name, pod.namespace)
        except NotFound:  # a Job of another group, or deleted
            return False
        return can_replace_pod(job)

    async def _collect(
        self, kind: ResourceKind, read: Callable[[Object], Sequence[Read]], *, labels: str = "", fields: str
    ) -> list[Read]:
        """Return what `read` yields for each object in the namespaces that the operator watches."""
        collected: list[Read] = []
        for scope in kind.list_scopes(self.settings.watch_namespaces):
            parts: Iterable[Sequence[Read]] = await self.cluster.collect(
                kind, read, scope, labels=labels, fields=fields
            )
            collected += [item for part in parts for item in part]
        return collected


def _get_creation_time(found: Object) -> float:
    """Return when an object was created, in seconds since the epoch."""
    return parse_time(found["metadata"]["creationTimestamp"])
