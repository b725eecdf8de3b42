"""One pass over a watched job: the steps and checks that observe it, and the effects that they may have.

Only the decision about the pod of a hanging rank acts, where platform and namespace have enabled that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ...state.desired_state import DesiredState, Incident
from ...state.job_requests import JobRequests
from ...state.observation import Observation
from ...state.policy import Policy
from .. import DecisionStep, check_runner
from ..check_runner import DecisionCheck
from ..effects import DeleteWatchedPod, LocalizeProfile, SaveProfile, WriteIncident
from ..evaluate import PassResult
from ..failures import crash, gpu_error, gpu_warning, hang, superseded_faults
from ..stragglers import profile, shadow
from . import disruptions, estimated_faults, observed_incidents, pod_restart, rounds, slow_links

WatchedEffect = WriteIncident | LocalizeProfile | SaveProfile | DeleteWatchedPod
log = logging.getLogger(__name__)

WATCHED_CHECKS: tuple[DecisionCheck, ...] = (
    # Pods that Kubernetes has ended: their ranks, and those that wait for them, have not crashed.
    disruptions.check_disruptions,
    # GPU errors that DCGM reports on the job's nodes.
    gpu_error.check_gpu_errors,
    # Ranks that exited with an error.
    crash.check_crashes,
    # Ranks that make no progress.
    hang.check_hangs,
    # GPUs that show signs of an upcoming fault.
    gpu_warning.check_gpu_warnings,
    # Slow ranks and links, by the estimator alone.
    estimated_faults.check_estimated_faults,
    # What a profile window found where no open incident covers it.
    profile.check_profile,
)
"""The checks of a watched job, most certain first. No check places or replaces its pods: others do."""


def _advance_profile_window(observation: Observation, policy: Policy) -> DesiredState:
    """Begin or end a profile window, if the platform takes profiles of watched ranks."""
    return profile.advance_profile_window(observation, policy) if policy.observes_profiles else observation.desired


WATCHED_STEPS: tuple[tuple[str, DecisionStep], ...] = (
    # Settle superseded faults, before a check decides about them.
    ("superseded faults", superseded_faults.settle_superseded_faults),
    # Settle what followed from pods that Kubernetes has ended.
    ("consequences", disruptions.settle_consequences),
    # Record the GPU counters of new nodes as a baseline: older errors did not happen during this job.
    ("gpu baseline", gpu_error.record_gpu_baseline),
    # Record when the job and its round trained first, and when the job has ended.
    ("rounds", rounds.record_progress),
    # Record which connections are slow, before an incident names them.
    ("link evidence", slow_links.record_slow_links),
    # Close incidents that are over, before new decisions are made.
    ("verify", observed_incidents.verify_incidents),
    # Decide about the pod of a rank that blocks the others, before the checks settle the reports of that.
    ("pod restart", pod_restart.request_pod_restart),
    # Run the checks above, and write what they find as Incidents.
    ("checks", partial(check_runner.run_checks, checks=WATCHED_CHECKS)),
    # Begin or end a profile window. The result of the last one is recorded by now.
    ("profile", _advance_profile_window),
    # Request the steps that the estimator lacks.
    ("estimator request", shadow.update_estimator_request),
    # Request the connections of a slow link. Requests of the step above come first.
    ("link request", slow_links.request_link_evidence),
)


def evaluate_watched_job(observation: Observation, policy: Policy) -> PassResult:
    """Run all steps over `observation`, which has the described plan. Pure."""
    failures = []
    for name, step in WATCHED_STEPS:
        try:
            desired = step(observation, policy)
        except Exception as error:
            log.exception("watched job %s/%s: step %r failed", observation.job.namespace, observation.job.name, name)
            failures.append(f"{name}: {error!r}")
            continue
        observation = observation.with_desired(_keep_observations(observation.desired, desired))
    return PassResult(observation, tuple(failures))


def list_watched_effects(observation: Observation, written: Mapping[str, Incident]) -> tuple[WatchedEffect, ...]:
    """Return the effects to carry out, once the state is written. `written`: the incidents in the cluster, by name.

    Profiles are evaluated in this process, and saved as ProfileWindows of their incidents.
    """
    incidents = (
        WriteIncident(incident, written.get(incident.name))
        for incident in observation.state.incidents.current
        if written.get(incident.name) != incident
    )
    profiles = (
        effect
        for effect in profile.list_profile_effects(observation)
        if isinstance(effect, LocalizeProfile | SaveProfile)
    )
    return (*incidents, *profiles, *pod_restart.list_pod_deletions(observation))


def _keep_observations(before: DesiredState, after: DesiredState) -> DesiredState:
    """Return `after` as far as it only observes. Plan and placement are descriptions, which no step may change.

    Of the requests, those for evidence and profiles stay. Sidecars answer the former, and the ranks do not notice.
    """
    if after is before:
        return before
    state = replace(
        before.state,
        lifecycle=after.state.lifecycle,
        gpus=after.state.gpus,
        watched=after.state.watched,
        profiling=after.state.profiling,
        incidents=replace(after.state.incidents, quarantine_requests=()),
    )
    requests = JobRequests(
        evidence=after.requests.evidence,
        issued=after.requests.issued,
        connections_requested_at=after.requests.connections_requested_at,
        link_check=after.requests.link_check,
        profile=after.requests.profile,
        profile_window=after.requests.profile_window,
    )
    return DesiredState(before.plan, state, requests)
