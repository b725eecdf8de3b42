"""The operator and the resource definitions agree."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.failures.finding import FaultClass, Finding, Signal, SignalKind
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_operator.api.codec import from_json
from pacekeeper_operator.api.conditions import ConditionStatus, JobCondition, Reason
from pacekeeper_operator.api.formats import format_duration, format_time, parse_duration, parse_time
from pacekeeper_operator.api.incident import (
    IncidentCause,
    IncidentClass,
    IncidentOutcome,
    IncidentSpec,
    IncidentStatus,
    ObjectRef,
    RemedyPrice,
    Restart,
    RestartPart,
    RestartPartName,
)
from pacekeeper_operator.api.node_history import NodeIncidentKind
from pacekeeper_operator.api.node_probe import ProbeResult
from pacekeeper_operator.api.node_quarantine import QuarantinePhase, QuarantineSpec, QuarantineStatus
from pacekeeper_operator.api.training_job import (
    MAX_JOB_NAME,
    AccessMode,
    CheckpointSpec,
    CleanPodPolicy,
    DetectionSpec,
    ExitCodesSpec,
    JobPhase,
    JobSpec,
    JobStatus,
    LeafCrossings,
    RemediationMode,
    RemediationSpec,
    Remedy,
    RequestedSyncMode,
    ResumePoint,
    RunPolicySpec,
    TrainingJob,
    WorkerCounts,
)
from pacekeeper_operator.state.incident_key import IncidentKey
from testing.kubernetes.schema import find_schema_errors, read_schema, with_defaults

TEMPLATE = {"spec": {"containers": [{"name": "trainer"}]}}
CONDITION = ConditionStatus(JobCondition.DEGRADED, "True", Reason.ALL_RANKS_SLOW, "slow", 1.25, 3)


def build_job(name: str = "gpt", uid: str = "0a1b2c3d-4e5f") -> TrainingJob:
    return TrainingJob("team-a", name, uid, 1, JobSpec(TEMPLATE))


def test_defaults_are_those_of_the_schema() -> None:
    assert JobSpec.parse(with_defaults({"template": TEMPLATE}, read_schema("trainingjobs")["spec"])) == JobSpec(
        TEMPLATE
    )
    stored = with_defaults({"reason": "XID 79"}, read_schema("nodequarantines")["spec"])
    assert QuarantineSpec.parse(stored) == QuarantineSpec("XID 79")


def test_a_job_spec_reads_every_field() -> None:
    spec = JobSpec.parse(
        {
            "template": TEMPLATE,
            "replicas": 4,
            "minReplicas": 2,
            "spares": 1,
            "nprocPerNode": 8,
            "suspend": True,
            "syncMode": "AsyncEDiT",
            "schedulingTimeout": "1m30s",
            "checkpoint": {
                "path": "/c",
                "everySteps": 7,
                "keep": 2,
                "volumeClaimName": "claim",
                "subPath": "",
                "adopt": "other",
                "readOnly": True,
                "uri": "s3://bucket",
                "accessMode": "ReadWriteOnce",
            },
            "detection": {"stragglerSlowdown": 2, "windowSteps": 16, "hangSeconds": 9},
            "remediation": {
                "mode": "Recommend",
                "allow": ["Rebalance"],
                "maxRestarts": 0,
                "restartWindow": "2h",
                "maxRoundsWithoutProgress": 5,
                "exitCodes": {"doNotRetry": [43, 44], "replaceNode": [42]},
            },
            "runPolicy": {"activeDeadlineSeconds": 5, "ttlSecondsAfterFinished": 0, "cleanPodPolicy": "All"},
            "ofALaterVersion": 1,
        }
    )
    assert spec == JobSpec(
        template=TEMPLATE,
        replicas=4,
        min_replicas=2,
        spares=1,
        nproc_per_node=8,
        suspend=True,
        sync_mode=RequestedSyncMode.ASYNC_EDIT,
        scheduling_timeout=90.0,
        checkpoint=CheckpointSpec("/c", 7, 2, "claim", "", "other", True, "s3://bucket", AccessMode.READ_WRITE_ONCE),
        detection=DetectionSpec(2.0, 16, 9.0),
        remediation=RemediationSpec(
            RemediationMode.RECOMMEND, (Remedy.REBALANCE,), 0, 7200.0, 5, ExitCodesSpec((43, 44), (42,))
        ),
        run_policy=RunPolicySpec(5, 0, CleanPodPolicy.ALL),
    )
    assert spec.effective_min_replicas == 2
    assert JobSpec(TEMPLATE, replicas=4).effective_min_replicas == 4, "without minReplicas a job does not shrink"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "spec.template: is missing"),
        ({"template": TEMPLATE, "replicas": "four"}, "spec.replicas: 'four' must be of type int"),
        ({"template": TEMPLATE, "replicas": True}, "spec.replicas: True must be of type int"),
        ({"template": TEMPLATE, "schedulingTimeout": "5 min"}, "spec.schedulingTimeout: '5 min' is not a duration.*5m"),
        ({"template": TEMPLATE, "schedulingTimeout": 300}, "spec.schedulingTimeout: 300 is not a duration.*5m"),
        (
            {"template": TEMPLATE, "detection": {"hangSeconds": "soon"}},
            "spec.detection.hangSeconds: 'soon' must be auto",
        ),
        ({"template": TEMPLATE, "detection": []}, "spec.detection: must be an object"),
        (
            {"template": TEMPLATE, "remediation": {"allow": ["x"]}},
            r"spec.remediation.allow\[0\]: 'x' is not one of Restart",
        ),
        ({"template": TEMPLATE, "remediation": {"allow": "x"}}, "spec.remediation.allow: must be a list"),
        (
            {"template": TEMPLATE, "remediation": {"exitCodes": {"doNotRetry": ["one"]}}},
            r"spec.remediation.exitCodes.doNotRetry\[0\]: 'one' must be of type int",
        ),
        ({"template": TEMPLATE, "syncMode": "sync"}, "spec.syncMode: 'sync' is not one of Auto, Sync, EDiT, AsyncEDiT"),
    ],
)
def test_an_input_error_names_the_field(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        JobSpec.parse(spec)


@pytest.mark.parametrize(("text", "seconds"), [("1h30m", 5400), ("5m", 300), ("90s", 90), ("2h1s", 7201), ("0s", 0)])
def test_durations_are_parsed_and_formatted(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "1.5h", "-5m", "30m1h", "5m "])
def test_text_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="1h30m, 5m or 90s"):
        parse_duration(text)


def test_times_keep_microseconds() -> None:
    assert format_time(1_800_000_000.123456) == "2027-01-15T08:00:00.123456Z"
    assert parse_time("2027-01-15T08:00:00.123456Z") == 1_800_000_000.123456
    assert parse_time("2027-01-15T08:00:00Z") == 1_800_000_000, "the API server's own times have no fraction"


JOB_STATUS = JobStatus(
    phase=JobPhase.RUNNING,
    reason=Reason.TRAINING,
    message="trains",
    observed_generation=3,
    conditions=(CONDITION,),
    start_time=1.5,
    completion_time=9.0,
    round=2,
    step=10,
    total_steps=5000,
    progress="24%",
    remaining="5h20m",
    last_checkpoint_step=8,
    checkpoint_sub_path="gpt",
    resumed_from=ResumePoint(2, 8, "Memory"),
    workers=WorkerCounts.from_counts(4, 3, 1),
    selector="pacekeeper.dev/job=gpt",
    slowdown=1.25,
    goodput=0.97,
    sync_mode=SyncMode.SYNC,
    restarts=1,
    bottleneck="rank 2",
    leaf_crossings=LeafCrossings(now=4, best=2),
)
INCIDENT_STATUS = IncidentStatus(
    mode=RemediationMode.ACT,
    remedy=Remedy.REBALANCE,
    considered=(RemedyPrice(Remedy.REBALANCE, 100.0, 0.0, True, "free"), RemedyPrice(Remedy.LOCAL_SGD)),
    first_sign=1.0,
    detected=2.0,
    decided=3.0,
    applied=4.0,
    recovered=5.0,
    detected_seconds=1.0,
    recovered_seconds=4.0,
    steps_lost=0,
    restart=Restart((RestartPart(RestartPartName.LOAD, 3.5, 2),), "Memory", "Load (rank 2)"),
    slowdown_before=1.5,
    slowdown_after=1.0,
    predicted_gain=100.0,
    measured_gain=90.0,
    predicted_cost=5.0,
    measured_cost=6.0,
    diagnosis=Finding(
        FaultClass.NETWORK, "link 0 → 1", (Signal(SignalKind.PROBE, "slow on no other link"),), 0.98, "look at it"
    ),
    outcome=IncidentOutcome.MITIGATED,
    message="better",
)
QUARANTINE_STATUS = QuarantineStatus(
    phase=QuarantinePhase.PROBING,
    message="probing",
    conditions=(CONDITION,),
    node_uid="uid",
    cordoned_at=1.0,
    previously_cordoned=False,
    probes=(ProbeResult("probe-1", 1.0, 2.0, False, "no GPU"), ProbeResult("probe-2", 3.0)),
)


@pytest.mark.parametrize(
    ("status", "plural"),
    [(JOB_STATUS, "trainingjobs"), (INCIDENT_STATUS, "incidents"), (QUARANTINE_STATUS, "nodequarantines")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_status_that_is_written_is_read_unchanged(status: Any, plural: str) -> None:
    """Every field is set here, and the schema neither prunes nor refuses any."""
    patch = status.to_patch()
    assert None not in patch.values(), "set every field, so that every one is checked"
    assert set(patch) == set(read_schema(plural)["status"]["properties"])
    assert find_schema_errors(patch, read_schema(plural)["status"]) == []
    assert type(status).parse(patch) == status


def test_fields_without_a_value_are_removed_by_the_patch() -> None:
    assert JobStatus(slowdown=1.5).to_patch()["bottleneck"] is None
    assert JobStatus(slowdown=float("inf")).to_patch()["slowdown"] is None, "JSON has no infinity"


def test_a_spec_that_is_written_is_read_unchanged() -> None:
    incident = IncidentSpec(
        job_ref=ObjectRef("gpt", "team-a", "uid"),
        cause=IncidentCause.NODE_LOST,
        class_=IncidentClass.INFRASTRUCTURE,
        round=3,
        rank=2,
        worker="gpt-w2-0",
        node="node-3",
        message="gone",
        evidence=("no answer",),
    )
    assert find_schema_errors(incident.to_json(), read_schema("incidents")["spec"]) == []
    assert set(incident.to_json()) == set(read_schema("incidents")["spec"]["properties"])
    assert IncidentSpec.parse(incident.to_json()) == incident
    quarantine = QuarantineSpec("XID 79", "uid", ObjectRef("gpt-r3", "team-a"), 5400.0, True)
    assert find_schema_errors(quarantine.to_json(), read_schema("nodequarantines")["spec"]) == []
    assert QuarantineSpec.parse(quarantine.to_json()) == quarantine


def test_evidence_is_cut_to_the_limits_of_the_schema() -> None:
    evidence = tuple(f"{i} " + "x" * 100_000 for i in range(500))
    written = IncidentSpec(ObjectRef("gpt", "team-a", "u"), IncidentCause.HANG, evidence=evidence).to_json()["evidence"]
    limits = read_schema("incidents")["spec"]["properties"]["evidence"]
    assert len(written) == limits["maxItems"]
    assert {len(item) for item in written} == {limits["items"]["maxLength"]}
    assert written[0].startswith("0 ")


def test_a_state_keeps_what_another_version_of_the_operator_wrote() -> None:
    fields = read_schema("trainingjobstates")
    assert set(fields) == {"apiVersion", "kind", "metadata", "schemaVersion", "plan", "state"}
    for name in ("plan", "state"):
        assert fields[name]["x-kubernetes-preserve-unknown-fields"] is True
        assert "properties" not in fields[name], "a field that the schema names is pruned or refused by an older one"


@pytest.mark.parametrize(
    ("values", "plural", "path"),
    [
        (Remedy, "trainingjobs", "spec.remediation.allow.items"),
        (RemediationMode, "trainingjobs", "spec.remediation.mode"),
        (RequestedSyncMode, "trainingjobs", "spec.syncMode"),
        (CleanPodPolicy, "trainingjobs", "spec.runPolicy.cleanPodPolicy"),
        (JobPhase, "trainingjobs", "status.phase"),
        (IncidentClass, "incidents", "spec.class"),
        (IncidentOutcome, "incidents", "status.outcome"),
        (RemediationMode, "incidents", "status.mode"),
        (QuarantinePhase, "nodequarantines", "status.phase"),
        (NodeIncidentKind, "nodehistories", "status.incidents.items.kind"),
        (NodeIncidentKind, "nodehistories", "status.counts.items.kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_enum_values_are_those_of_the_schema(values: Any, plural: str, path: str) -> None:
    found: Any = {"properties": read_schema(plural)}
    for name in path.split("."):
        found = found["items"] if name == "items" else found["properties"][name]
    assert found["enum"] == list(values)


def test_each_sync_mode_can_be_requested_and_auto_is_none_of_them() -> None:
    assert {*RequestedSyncMode} - {*SyncMode} == {RequestedSyncMode.AUTO}
    assert {*SyncMode} <= {*RequestedSyncMode}


@pytest.mark.parametrize("cause", IncidentCause)
def test_incident_names_are_deterministic_and_differ_between_jobs(cause: IncidentCause) -> None:
    name = IncidentKey(cause, 3).incident_name(build_job())
    assert name == IncidentKey(cause, 3).incident_name(build_job())
    assert re.fullmatch(rf"gpt-r3-{cause}-0a1b2", name)
    others = {
        IncidentKey(cause, 3).incident_name(build_job(uid="9-of-a-later-job")),
        IncidentKey(cause, 4).incident_name(build_job()),
        IncidentKey(cause, 3, occurrence=2).incident_name(build_job()),
        IncidentKey(cause, 3, worker="j-w1-0").incident_name(build_job()),
        IncidentKey(cause, 3, rank=1).incident_name(build_job()),
        IncidentKey(cause, 3, gpu="node/0/XID=79").incident_name(build_job()),
    }
    assert name not in others
    assert len(others) == 6
    longest = IncidentKey(cause, 10**9, rank=10**6, occurrence=10**6).incident_name(build_job("j" * MAX_JOB_NAME))
    assert len(longest) <= 253


def test_a_training_job_is_parsed_from_its_object() -> None:
    metadata = {"namespace": "team-a", "name": "gpt", "uid": "u", "generation": 4}
    times = {"creationTimestamp": "2027-01-15T08:00:00Z", "deletionTimestamp": "2027-01-15T09:00:00Z"}
    found = TrainingJob.parse({"metadata": metadata | times, "spec": {"template": TEMPLATE}})
    assert found == TrainingJob("team-a", "gpt", "u", 4, JobSpec(TEMPLATE), 1_800_000_000, deleting=True)


def test_worker_counts_have_a_summary_for_a_column() -> None:
    assert WorkerCounts.from_counts(desired=4, ready=3, spare=1).summary == "3/4+1"
    assert WorkerCounts.from_counts(desired=4, ready=4, spare=0).summary == "4/4"


def test_only_fields_that_are_missing_are_named() -> None:
    with pytest.raises(InputError, match=r"^spec.incidentRef: namespace must be given$"):
        from_json(ObjectRef, {"name": "i"}, "spec.incidentRef", {})
