"""What stands between a request and the store: defaults, validation, policies of the chart, quota.

Of the built-in kinds only that is checked which somebody in a simulation may get wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ApiError, FieldError, build_bad_request, build_forbidden, build_invalid
from .objects import ServedKind, Object, estimate_json_bytes, drop_nulls
from .schema import load_schema

QUARANTINE_TAINT = "pacekeeper.dev/quarantine"
MAX_REQUEST_BYTES = 3 * 1024 * 1024
MAX_STORED_BYTES = 1_572_864
MAX_CONFIG_MAP_BYTES = 1024 * 1024

_DNS_SUBDOMAIN_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_DNS_LABEL_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_POD_FIELD_NAMES = """
activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy enableServiceLinks
ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers hostname hostnameOverride imagePullSecrets
initContainers nodeName nodeSelector os overhead preemptionPolicy priority priorityClassName readinessGates
resourceClaims resources restartPolicy runtimeClassName schedulerName schedulingGates schedulingGroup securityContext
serviceAccount serviceAccountName setHostnameAsFQDN shareProcessNamespace subdomain terminationGracePeriodSeconds
tolerations topologySpreadConstraints volumes
"""
_CONTAINER_FIELD_NAMES = """
args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe resizePolicy resources
restartPolicy restartPolicyRules securityContext startupProbe stdin stdinOnce terminationMessagePath
terminationMessagePolicy tty volumeDevices volumeMounts workingDir
"""
_POD_FIELDS, _CONTAINER_FIELDS = frozenset(_POD_FIELD_NAMES.split()), frozenset(_CONTAINER_FIELD_NAMES.split())
_LABEL_VALUE_PATTERN = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_UNQUALIFIED_FINALIZERS = ("foregroundDeletion", "orphan", "kubernetes")
_DEFAULT_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    for key in ("not-ready", "unreachable")
]


@dataclass(frozen=True)
class Actor:
    """Who asks."""

    name: str
    """A place, or a machine of the world; "tenant" and what begins with it are users without rights on nodes."""
    manager: str
    """Of the fields that he writes."""
    operator: bool = False

    @property
    def is_tenant(self) -> bool:
        return self.name.startswith("tenant")


def decode_body(kind: ServedKind, body: Object, *, strict: bool) -> Object:
    """`body` as its kind knows it, with what is filled in. Raises ApiError where it is of another form."""
    unknown: list[str] = []
    if kind.custom:
        body = load_schema(kind.plural).prune(body, unknown)
    else:
        body = drop_nulls(body)
        if kind.plural == "pods":
            body = _decode_pod(body, unknown, strict)
        elif kind.plural == "nodes":
            body = _decode_node(body)
    if strict and unknown:
        words = ", ".join(f'unknown field "{path}"' for path in sorted(unknown))
        version = kind.api_version.rpartition("/")[2]
        raise build_bad_request(
            f'{kind.name} in version "{version}" cannot be handled as a {kind.name}: strict decoding error: {words}'
        )
    return body


def check_references(kind: ServedKind, pod: Object) -> None:
    """Raises ApiError where a pod names what does not exist: there are no service accounts and priorities of users."""
    name, spec = pod["metadata"]["name"], pod["spec"]
    namespace = pod["metadata"].get("namespace", "")
    if spec.get("priorityClassName"):
        raise build_forbidden(kind, name, f"no PriorityClass with name {spec['priorityClassName']} was found")
    account = spec["serviceAccountName"]
    if account != "default":
        why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
        raise build_forbidden(kind, name, why)


def validate_object(kind: ServedKind, new: Object, old: Object | None) -> None:
    """Raises ApiError where `new` is not valid, or may not follow `old`."""
    causes = list(_find_metadata_errors(new, old))
    if kind.custom:
        causes += _find_custom_errors(kind, new, old)
    elif kind.plural == "pods":
        causes += _find_pod_errors(new) if old is None else _find_pod_change_errors(new, old)
    elif kind.plural == "nodes":
        causes += _find_node_errors(new)
    elif kind.plural in ("configmaps", "secrets"):
        causes += _find_data_errors(new)
    if causes:
        raise build_invalid(kind, new["metadata"]["name"], causes)
    if estimate_json_bytes(new) > MAX_STORED_BYTES:
        raise ApiError(500, "", "etcdserver: request is too large")


def _find_metadata_errors(new: Object, old: Object | None) -> Iterator[FieldError]:
    metadata = new["metadata"]
    name = metadata["name"]
    if old is None and (not _DNS_SUBDOMAIN_PATTERN.fullmatch(name) or len(name) > 253):
        yield FieldError("metadata.name", f'Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist of …')
    labels = metadata.get("labels", {})
    if old is None or labels is not old["metadata"].get("labels"):
        for value in labels.values():
            if len(value) > 63 or not _LABEL_VALUE_PATTERN.fullmatch(value):
                yield FieldError("metadata.labels", f'Invalid value: "{value}": a valid label must be an empty string or …')
    before = old["metadata"].get("finalizers", ()) if old is not None else ()
    added = [(i, name) for i, name in enumerate(metadata.get("finalizers", ())) if name not in before]
    for i, name in added:
        if "/" not in name and name not in _UNQUALIFIED_FINALIZERS:
            words = f'Invalid value: "{name}": name is neither a standard finalizer name nor is it fully qualified'
            yield FieldError(f"metadata.finalizers[{i}]", words)
    if old is not None and "deletionTimestamp" in old["metadata"] and added:
        listed = ", ".join(f'"{name}"' for _, name in added)
        words = "no new finalizers can be added if the object is being deleted, found new finalizers"
        yield FieldError("metadata.finalizers", f"Forbidden: {words} []string{{{listed}}}", "FieldValueForbidden")


def _find_custom_errors(kind: ServedKind, new: Object, old: Object | None) -> list[FieldError]:
    known = load_schema(kind.plural)
    causes = known.find_errors(new) if old is None else known.find_errors(new, old)
    if causes:
        return causes
    return known.find_broken_rules(new) if old is None else known.find_broken_rules(new, old)


def _decode_pod(body: Object, unknown: list[str], strict: bool) -> Object:
    spec = body.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("containers", []), list):
        raise build_bad_request('Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal')
    if "terminationGracePeriodSeconds" in spec and "serviceAccountName" in spec and "priority" in spec:
        return body  # it has been here before
    if strict:
        unknown += [f"spec.{name}" for name in spec if name not in _POD_FIELDS]
        for field in ("containers", "initContainers"):
            for i, container in enumerate(spec.get(field, ())):
                unknown += [f"spec.{field}[{i}].{name}" for name in container if name not in _CONTAINER_FIELDS]
    own = spec.get("tolerations", [])
    keys = [toleration.get("key") for toleration in own]
    return {
        **body,
        "spec": {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "schedulerName": "default-scheduler",
            "serviceAccountName": "default",
            "enableServiceLinks": True,
            "priority": 0,
            **spec,
            "containers": [_default_requests(container) for container in spec.get("containers", ())],
            "tolerations": [*own, *(default for default in _DEFAULT_TOLERATIONS if default["key"] not in keys)],
        },
    }


def _default_requests(container: Object) -> Object:
    """Where only a limit is given, it is also what is requested."""
    resources = container.get("resources", {})
    limits = resources.get("limits")
    if not limits:
        return container
    return {**container, "resources": {**resources, "requests": {**limits, **resources.get("requests", {})}}}


def _find_pod_errors(pod: Object) -> Iterator[FieldError]:
    spec = pod["spec"]
    if not spec["containers"]:
        yield FieldError("spec.containers", "Required value", "FieldValueRequired")
    volumes = [volume.get("name") for volume in spec.get("volumes", ())]
    for field in ("initContainers", "containers"):
        for i, container in enumerate(spec.get(field, ())):
            yield from _find_container_errors(container, f"spec.{field}[{i}]", volumes)
    policies = ("Always", "OnFailure", "Never")
    if spec["restartPolicy"] not in policies:
        listed = ", ".join(f'"{policy}"' for policy in policies)
        words = f'Unsupported value: "{spec["restartPolicy"]}": supported values: {listed}'
        yield FieldError("spec.restartPolicy", words, "FieldValueNotSupported")


def _find_container_errors(container: Object, path: str, volumes: list[Any]) -> Iterator[FieldError]:
    name = container.get("name", "")
    if not name:
        yield FieldError(f"{path}.name", "Required value", "FieldValueRequired")
    elif not _DNS_LABEL_PATTERN.fullmatch(name) or len(name) > 63:
        words = f'Invalid value: "{name}": a lowercase RFC 1123 label must consist of …'
        yield FieldError(f"{path}.name", words)
    if not container.get("image"):
        yield FieldError(f"{path}.image", "Required value", "FieldValueRequired")
    for i, mount in enumerate(container.get("volumeMounts", ())):
        if mount.get("name") not in volumes:
            words = f'Not found: "{mount.get("name")}"'
            yield FieldError(f"{path}.volumeMounts[{i}].name", words, "FieldValueNotFound")


def _find_pod_change_errors(new: Object, old: Object) -> Iterator[FieldError]:
    """Of a pod's spec little may change. A pod is bound to its node by its subresource `binding`."""
    one, other = new["spec"], old["spec"]
    if one is other or one == other:
        return
    free = ("activeDeadlineSeconds", "tolerations", "schedulingGates")
    if {**one, **dict.fromkeys(free)} != {**other, **dict.fromkeys(free)}:
        words = "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,…"
        yield FieldError("spec", words, "FieldValueForbidden")


def _decode_node(body: Object) -> Object:
    """What is false or empty is not written down."""
    spec = body.get("spec", {})
    empty = [name for name in ("unschedulable", "taints") if name in spec and not spec[name]]
    if not empty and "spec" in body:
        return body
    return {**body, "spec": {name: part for name, part in spec.items() if name not in empty}}


def _find_node_errors(node: Object) -> Iterator[FieldError]:
    effects = ("NoSchedule", "PreferNoSchedule", "NoExecute")
    for i, taint in enumerate(node["spec"].get("taints", ())):
        if taint["effect"] not in effects:
            listed = ", ".join(f'"{effect}"' for effect in effects)
            words = f'Unsupported value: "{taint["effect"]}": supported values: {listed}'
            yield FieldError(f"metadata.taints[{i}].effect", words, "FieldValueNotSupported")


def _find_data_errors(body: Object) -> Iterator[FieldError]:
    if sum(len(value) for value in body.get("data", {}).values()) > MAX_CONFIG_MAP_BYTES:
        yield FieldError("[]", f"Too long: may not be more than {MAX_CONFIG_MAP_BYTES} bytes", "FieldValueTooLong")


# Who may write what: the roles of the chart and of its users, and its admission policies.

_TENANT_KINDS = ("pods", "configmaps", "secrets", "events", "networkpolicies", "trainingjobs", "incidents")


def authorize_actor(kind: ServedKind, name: str, verb: str, actor: Actor) -> None:
    """Raises ApiError where the actor's roles do not allow it. Of tenants only: the operator's rights are those of its
    chart, which tests on a real cluster prove."""
    allowed = kind.plural in _TENANT_KINDS and (kind.plural != "incidents" or verb == "delete")
    if actor.is_tenant and not allowed:
        raise build_forbidden(kind, name, f'User "{actor.name}" cannot {verb} resource "{kind.plural}"')


def enforce_policies(kind: ServedKind, new: Object | None, old: Object | None, actor: Actor) -> None:
    """Raises ApiError where a policy of the chart denies that the operator makes `new` of `old` (None: it is created,
    or deleted)."""
    if not actor.operator:
        return
    for policy in ADMISSION_POLICIES.get(kind.plural, ()):
        why = policy(new, old)
        if why:
            body = new or old
            assert body is not None
            title = f"pacekeeper-{policy.__name__.strip('_')}"
            words = f"ValidatingAdmissionPolicy '{title}' with binding '{title}' denied request: {why}"
            error = build_forbidden(kind, body["metadata"]["name"], words)
            raise ApiError(422, "Invalid", error.message, error.details)


def _check_ownership(new: Object | None, old: Object | None) -> str:
    orphaned = old is not None and not old["metadata"].get("ownerReferences")
    if new is None and old is not None and orphaned and old["kind"] == "TrainingJobState":
        return ""
    for body in (new, old):
        if body is None:
            continue
        kinds = [
            owner["kind"]
            for owner in body["metadata"].get("ownerReferences", ())
            if owner.get("controller") and owner["apiVersion"].startswith("pacekeeper.dev/")
        ]
        of_node = body["kind"] == "Pod" and not {"NodeQuarantine", "NodeProbe"}.isdisjoint(kinds)
        if "TrainingJob" not in kinds and not of_node:
            return (
                "the operator may touch only what a TrainingJob controls, and in its own namespace pods that a "
                "NodeQuarantine or NodeProbe controls"
            )
    return ""


def _check_node_write(new: Object | None, old: Object | None) -> str:
    if new is None or old is None:
        return ""
    free = dict.fromkeys(("taints", "unschedulable"))
    if {**new["spec"], **free} != {**old["spec"], **free}:
        return "of a node's spec the operator may change only the cordon (unschedulable) and its own taint"
    free = dict.fromkeys(("managedFields", "resourceVersion", "generation"))
    if {**new["metadata"], **free} != {**old["metadata"], **free}:
        return "the operator may not change labels, annotations or any other metadata of a node"
    taints = [[t for t in b["spec"].get("taints", ()) if t["key"] != QUARANTINE_TAINT] for b in (new, old)]
    if taints[0] != taints[1]:
        return f"the operator may change no taint of a node but {QUARANTINE_TAINT}"
    if any(t["key"] == QUARANTINE_TAINT and t["effect"] != "NoSchedule" for t in new["spec"].get("taints", ())):
        return "the effect of the operator's taint is NoSchedule"
    return ""


def _check_job_write(new: Object | None, old: Object | None) -> str:
    if new is None or (old is not None and new["spec"] == old["spec"]):
        return ""
    return "what is wanted of a job is its users' to say: the operator neither makes jobs nor changes their spec"


def _check_secret_write(new: Object | None, _: Object | None) -> str:
    makes_token = new is not None and new.get("type") == "kubernetes.io/service-account-token"
    return "the operator makes no tokens" if makes_token else ""


def _check_plan_write(new: Object | None, old: Object | None) -> str:
    if new is None and old is not None:
        metadata = old["metadata"]
        job = metadata.get("labels", {}).get("pacekeeper.dev/job", "")
        owners = [owner["name"] for owner in metadata.get("ownerReferences", ()) if owner["kind"] == "TrainingJob"]
        if job in owners and metadata["name"] == f"{job}-plan":
            return ""
    return "of all ConfigMaps the operator may delete only the plans of jobs from before there were TrainingJobStates"


ADMISSION_POLICIES: Mapping[str, tuple[Callable[[Object | None, Object | None], str], ...]] = {
    "pods": (_check_ownership,),
    "networkpolicies": (_check_ownership,),
    "trainingjobstates": (_check_ownership,),
    "nodes": (_check_node_write,),
    "trainingjobs": (_check_job_write,),
    "secrets": (_check_secret_write,),
    "configmaps": (_check_plan_write,),
}
"""Those of the chart that bind the operator, by the kind that they are about: owned, nodes, jobs, secrets, plans."""
POLICIES_NOT_SIMULATED: Mapping[str, str] = {
    "pods": "what a template may have of its node is a question of text, which unit and cluster tests ask",
    "states": "tenants have no right to write a TrainingJobState in the first place; administrators may",
}
