"""The breaker of the injection: when what was injected blocks pods, or makes jobs fail. Pure.

The first rule of the watch is that it breaks no job. So one blocked pod is enough, and it stays off until an
administrator has removed the cause and switches it on.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.watched_container import STACK_SIGNAL_NUMBER

from ..api.formats import parse_time
from ..api.names import Object
from ..pods.injection import ENVIRONMENT_CONTAINER, INJECTED_CONTAINERS, OWN_NAME_PREFIX, WATCH_CONTAINER
from ..pods.resources import Resources, is_denied_for, parse_quantity

BLOCKED_POD_SECONDS = 30.0
"""Duration after which a container that cannot start counts. A pull that fails once may succeed the next time."""
API_SERVER_DELAY_SECONDS = 5.0
"""Longest time in which API servers learn of the switch-off. They read bindings once a second."""
EXCESS_FAILURE_PROBABILITY = 0.001
"""Highest probability by chance at which failures of watched jobs count.

A thousand kinds of failures that have nothing to do with the watch switch it off once.
"""
MIN_FAILED_JOBS = 3
"""Failures of two jobs may be one person's two attempts."""
DEFAULT_BACKOFF_LIMIT = 6  # Kubernetes' own default of backoffLimit

_HARMLESS_WAITS = frozenset({"", "PodInitializing", "ContainerCreating"})
_CAUSES_OF_THE_IMAGE = frozenset(
    {
        *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"),
        *("RegistryUnavailable", "CreateContainerConfigError"),
    }
)
"""Reasons that the image and the settings of the watched container have, of which the recorder has copies."""
_EXTERNAL_KILLS = frozenset({130, 137, 143})
_EXIT_CODE_OF_SIGNAL = 128  # plus its number: the exit code of a container
_EXCEEDED_QUOTA = re.compile(r"exceeded quota: [^,]+, requested: (\S+), used: (\S+), limited: (\S+)")


@dataclass(frozen=True)
class BlockedPod:
    """A pod that a container of the injection keeps from running."""

    namespace: str
    name: str
    uid: str
    container: str
    reason: str
    has_failed: bool  # whether the pod has ended by that
    controller: tuple[str, str] = ("", "")  # kind and name


@dataclass(frozen=True)
class InjectionFailure:
    """Why the injection has to be switched off."""

    message: str
    namespace: str = ""  # of the object that the message is about; "": several
    kind: str = ""
    name: str = ""
    uid: str = ""


@dataclass(frozen=True)
class JobOutcome:
    """How a job has ended, by one of its pods."""

    controller: str  # UID
    is_watched: bool
    failure: str  # like "Error 1"; "": it has succeeded


def find_blocking_failure(blocked: Mapping[BlockedPod, float], now: float) -> InjectionFailure | None:
    """Return the failure of a pod that has failed by an injected container, or has been blocked too long by one.

    `blocked`: since when each of them is known to be blocked, in the seconds of `now`.
    """
    for pod, since in blocked.items():
        if pod.has_failed or now - since >= BLOCKED_POD_SECONDS:
            effect = "has failed" if pod.has_failed else f"cannot start for {now - since:.0f} s"
            message = f"pod {pod.namespace}/{pod.name} {effect}: container {pod.container}: {pod.reason}"
            return InjectionFailure(message, pod.namespace, "Pod", pod.name, pod.uid)
    return None


def list_blocked_pods(pods: Iterable[Object]) -> Iterator[BlockedPod]:
    """Yield the watched pods that have not run because of an injected container."""
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        if metadata.get("deletionTimestamp") or _is_disrupted(status):
            continue
        has_failed = status.get("phase") == "Failed"
        for container in status.get("initContainerStatuses") or ():
            reason = _find_failure(container) if has_failed else _find_block(container)
            if container["name"] in INJECTED_CONTAINERS and reason:
                controllers = [owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")]
                controller = (controllers[0]["kind"], controllers[0]["name"]) if controllers else ("", "")
                yield BlockedPod(
                    metadata["namespace"],
                    metadata["name"],
                    metadata["uid"],
                    container["name"],
                    reason,
                    has_failed,
                    controller,
                )
                break


def find_denial_failure(
    events: Iterable[Object], resources: Resources, since: float, is_watched: Callable[[str], bool]
) -> InjectionFailure | None:
    """Return the failure of a controller that cannot create pods because of what is injected.

    `events`: Events of reason FailedCreate (events.k8s.io/v1). `resources`: of the sidecar. Events before `since`
    (seconds since the epoch) do not count. `is_watched` answers whether the pods of a namespace are watched. It is
    called only for denials that name no container.
    """
    for event in events:
        regarding, note = event.get("regarding") or {}, str(event.get("note") or "")
        namespace = str(regarding.get("namespace") or "")
        if _get_event_time(event) < since:
            continue
        names_injected = any(name in note for name in (*INJECTED_CONTAINERS, f'"{OWN_NAME_PREFIX}'))
        is_caused = names_injected or (_is_caused_by_resources(note, resources) and is_watched(namespace))
        if is_caused:
            kind, name = str(regarding.get("kind") or ""), str(regarding.get("name") or "")
            message = f"{kind} {namespace}/{name} cannot create a pod: {note}"
            return InjectionFailure(message, namespace, kind, name, str(regarding.get("uid") or ""))
    return None


def find_excess_failure(outcomes: Iterable[JobOutcome]) -> InjectionFailure | None:
    """Return the failure if watched jobs fail in a way in which jobs that are not watched do not.

    For each way to fail, it is Fisher's exact test, one-sided: the probability that at least this many of the failed
    jobs are watched, if the watch has no effect. Without jobs that are not watched, nothing can be compared.
    """
    jobs: dict[bool, dict[str, set[str]]] = {True: defaultdict(set), False: defaultdict(set)}
    for outcome in outcomes:
        jobs[outcome.is_watched][outcome.controller].add(outcome.failure)
    watched, others = jobs[True], jobs[False]
    for failure in sorted({failure for failures in watched.values() for failure in failures} - {""}):
        failed = sum(failure in failures for failures in watched.values())
        failed_others = sum(failure in failures for failures in others.values())
        if failed < MIN_FAILED_JOBS:
            continue
        probability = compute_fisher_probability(failed, len(watched), failed_others, len(others))
        if probability <= EXCESS_FAILURE_PROBABILITY:
            return InjectionFailure(
                f"{failed} of {len(watched)} watched jobs have failed with {failure}, "
                f"and {failed_others} of {len(others)} that are not watched"
            )
    return None


def find_signal_failure(outcomes: Iterable[JobOutcome]) -> InjectionFailure | None:
    """Return the failure if the signal for stacks has ended a watched container: nothing else sends it."""
    code = _EXIT_CODE_OF_SIGNAL + STACK_SIGNAL_NUMBER
    if not any(outcome.is_watched and outcome.failure.endswith(f" {code}") for outcome in outcomes):
        return None
    return InjectionFailure(
        f"a container of a watched job has ended with exit code {code}: signal {STACK_SIGNAL_NUMBER}, by which the "
        "watch asks for stacks"
    )


def find_suspicious_failures(outcomes: Iterable[JobOutcome]) -> bool:
    """Return whether enough watched jobs have failed alike for a comparison with others."""
    controllers: dict[str, set[str]] = defaultdict(set)
    for outcome in outcomes:
        if outcome.is_watched and outcome.failure:
            controllers[outcome.failure].add(outcome.controller)
    return any(len(failed) >= MIN_FAILED_JOBS for failed in controllers.values())


def read_outcome(pod: Object, is_watched: bool) -> JobOutcome | None:
    """Return the outcome that a pod shows; None: none. A pod that was ended from outside shows none."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    controllers = [owner["uid"] for owner in metadata.get("ownerReferences") or () if owner.get("controller")]
    phase = status.get("phase")
    is_deleted = "deletionTimestamp" in metadata  # torchrun ends with code 1 then
    if not controllers or phase not in ("Failed", "Succeeded") or is_deleted or _is_disrupted(status):
        return None
    if phase == "Succeeded":
        return JobOutcome(controllers[0], is_watched, "")
    for container in status.get("containerStatuses") or ():
        ended: Mapping[str, Any] = (container.get("state") or {}).get("terminated") or {}
        code, reason = ended.get("exitCode", 0), ended.get("reason") or "Error"
        if code and (code not in _EXTERNAL_KILLS or reason == "OOMKilled"):
            return JobOutcome(controllers[0], is_watched, f"{reason} {code}")
    return None


def compute_fisher_probability(failed: int, total: int, failed_others: int, total_others: int) -> float:
    """Return the probability that at least `failed` of all failures fall on the first group by chance."""
    failures, everything = failed + failed_others, total + total_others
    ways = math.comb(everything, failures)
    tail = range(failed, min(failures, total) + 1)
    return sum(math.comb(total, count) * math.comb(total_others, failures - count) for count in tail) / ways


def can_replace_pod(job: Object) -> bool:
    """Return whether a `batch/v1` Job can lose a pod: it counts each deleted pod as a failure of its own."""
    spec, status = job.get("spec") or {}, job.get("status") or {}
    if "backoffLimitPerIndex" in spec:
        return bool(spec["backoffLimitPerIndex"] > 0 and not status.get("failedIndexes"))
    return bool((status.get("failed") or 0) < spec.get("backoffLimit", DEFAULT_BACKOFF_LIMIT))


def _is_disrupted(status: Mapping[str, Any]) -> bool:
    """Return whether the pod was ended from outside: evicted, preempted, or past its deadline."""
    conditions = status.get("conditions") or ()
    return bool(status.get("reason")) or any(
        condition.get("type") == "DisruptionTarget" and condition.get("status") == "True" for condition in conditions
    )


def _find_block(container: Object) -> str:
    """Return why an init container does not start or does not end; "": nothing is wrong."""
    state = container.get("state") or {}
    waiting: Mapping[str, Any] = state.get("waiting") or {}
    reason = waiting.get("reason") or ""
    if container["name"] == ENVIRONMENT_CONTAINER and reason in _CAUSES_OF_THE_IMAGE:
        return ""
    if reason not in _HARMLESS_WAITS:
        return f"{reason}: {waiting.get('message') or 'no message'}"
    if container["name"] == WATCH_CONTAINER and container.get("started"):
        return ""  # the other containers start, too
    ended: Mapping[str, Any] = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    return f"it ended with exit code {ended['exitCode']}" if ended.get("exitCode") else ""


def _find_failure(container: Object) -> str:
    """Return how an init container of a failed pod has failed; "": it has not."""
    ended: Mapping[str, Any] = (container.get("state") or {}).get("terminated") or {}
    if container["name"] == WATCH_CONTAINER or not ended.get("exitCode"):
        return ""  # the sidecar of a pod that ends is ended by a signal
    return f"it ended with exit code {ended['exitCode']} ({ended.get('reason') or 'no reason'})"


def _get_event_time(event: Object) -> float:
    """Return when an Event was last seen, in seconds since the epoch; 0: unknown."""
    series = event.get("series") or {}
    times = [series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime")]
    return max((parse_time(time) for time in times if time), default=0.0)


def _is_caused_by_resources(note: str, resources: Resources) -> bool:
    """Return whether a LimitRange refuses the sidecar, or a quota would admit the pod without it."""
    guaranteed = {**resources, "requests": resources["limits"]}
    if any(is_denied_for(note, each, WATCH_CONTAINER) for each in (resources, guaranteed)):
        return True
    exceeded = _EXCEEDED_QUOTA.search(note)
    if exceeded is None:
        return False
    requested, used, limited = (_parse_amounts(text) for text in exceeded.groups())
    over = [name for name, amount in requested.items() if amount + used.get(name, 0.0) > limited.get(name, math.inf)]
    return bool(over) and all(
        requested[name] + used.get(name, 0.0) - _get_addition(name, resources) <= limited[name] for name in over
    )


def _get_addition(name: str, resources: Resources) -> float:
    """Return the most that the sidecar adds to `cpu`, `requests.cpu`, or `limits.cpu` of a quota."""
    return parse_quantity(resources["limits"].get(name.rpartition(".")[2], "0"))


def _parse_amounts(text: str) -> dict[str, float]:
    """Parse the amounts of a quota's message: `requests.cpu=8001m,pods=1`. Others than quantities are left out."""
    pairs: Sequence[tuple[str, str, str]] = [part.partition("=") for part in text.split(",")]
    amounts = {}
    for name, _, quantity in pairs:
        try:
            amounts[name] = parse_quantity(quantity)
        except InputError:
            continue
    return amounts
