"""What happens to a request before it is stored: defaults, validation, the chart's policies, and quota.

For built-in kinds, only what a participant of a simulation can get wrong is checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ApiError, FieldError, build_bad_request, build_forbidden, build_invalid
from .objects import Object, ServedKind, drop_nulls, estimate_json_bytes
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
    """The sender of a request."""

    name: str
    """A place, or a controller of the world. Names that begin with "tenant" are users without rights on nodes."""
    manager: str
    """Field manager of the written fields."""
    operator: bool = False

    @property
    def is_tenant(self) -> bool:
        return self.name.startswith("tenant")


def decode_body(kind: ServedKind, body: Object, *, strict: bool) -> Object:
    """Decode `body` for its kind, and fill in defaults. Raises ApiError if it is malformed."""
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
        errors = ", ".join(f'unknown field "{path}"' for path in sorted(unknown))
        version = kind.api_version.rpartition("/")[2]
        raise build_bad_request(
            f'{kind.name} in version "{version}" cannot be handled as a {kind.name}: strict decoding error: {errors}'
        )
    return body


def check_references(kind: ServedKind, pod: Object) -> None:
    """Check a pod's references. Raises ApiError if one does not exist: users have no service accounts or priorities."""
    name, spec = pod["metadata"]["name"], pod["spec"]
    namespace = pod["metadata"].get("namespace", "")
    if spec.get("priorityClassName"):
        raise build_forbidden(kind, name, f"no PriorityClass with name {spec['priorityClassName']} was found")
    account = spec["serviceAccountName"]
    if account != "default":
        detail = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
        raise build_forbidden(kind, name, detail)


def validate_object(kind: ServedKind, new: Object, old: Object | None) -> None:
    """Validate an object. Raises ApiError if `new` is invalid, or must not replace `old`."""
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
                yield FieldError(
                    "metadata.labels", f'Invalid value: "{value}": a valid label must be an empty string or …'
                )
    old_finalizers = old["metadata"].get("finalizers", ()) if old is not None else ()
    added = [(i, name) for i, name in enumerate(metadata.get("finalizers", ())) if name not in old_finalizers]
    for i, name in added:
        if "/" not in name and name not in _UNQUALIFIED_FINALIZERS:
            message = f'Invalid value: "{name}": name is neither a standard finalizer name nor is it fully qualified'
            yield FieldError(f"metadata.finalizers[{i}]", message)
    if old is not None and "deletionTimestamp" in old["metadata"] and added:
        names = ", ".join(f'"{name}"' for _, name in added)
        message = "no new finalizers can be added if the object is being deleted, found new finalizers"
        yield FieldError("metadata.finalizers", f"Forbidden: {message} []string{{{names}}}", "FieldValueForbidden")


def _find_custom_errors(kind: ServedKind, new: Object, old: Object | None) -> list[FieldError]:
    schema = load_schema(kind.plural)
    causes = schema.find_errors(new) if old is None else schema.find_errors(new, old)
    if causes:
        return causes
    return schema.find_broken_rules(new) if old is None else schema.find_broken_rules(new, old)


def _decode_pod(body: Object, unknown: list[str], strict: bool) -> Object:
    spec = body.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("containers", []), list):
        raise build_bad_request('Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal')
    if "terminationGracePeriodSeconds" in spec and "serviceAccountName" in spec and "priority" in spec:
        return body  # the defaults are filled in already
    if strict:
        unknown += [f"spec.{name}" for name in spec if name not in _POD_FIELDS]
        for field in ("containers", "initContainers"):
            for i, container in enumerate(spec.get(field, ())):
                unknown += [f"spec.{field}[{i}].{name}" for name in container if name not in _CONTAINER_FIELDS]
    tolerations = spec.get("tolerations", [])
    keys = [toleration.get("key") for toleration in tolerations]
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
            "tolerations": [*tolerations, *(default for default in _DEFAULT_TOLERATIONS if default["key"] not in keys)],
        },
    }


def _default_requests(container: Object) -> Object:
    """Use a limit as the default of a request."""
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
        supported = ", ".join(f'"{policy}"' for policy in policies)
        message = f'Unsupported value: "{spec["restartPolicy"]}": supported values: {supported}'
        yield FieldError("spec.restartPolicy", message, "FieldValueNotSupported")


def _find_container_errors(container: Object, path: str, volumes: list[Any]) -> Iterator[FieldError]:
    name = container.get("name", "")
    if not name:
        yield FieldError(f"{path}.name", "Required value", "FieldValueRequired")
    elif not _DNS_LABEL_PATTERN.fullmatch(name) or len(name) > 63:
        message = f'Invalid value: "{name}": a lowercase RFC 1123 label must consist of …'
        yield FieldError(f"{path}.name", message)
    if not container.get("image"):
        yield FieldError(f"{path}.image", "Required value", "FieldValueRequired")
    for i, mount in enumerate(container.get("volumeMounts", ())):
        if mount.get("name") not in volumes:
            message = f'Not found: "{mount.get("name")}"'
            yield FieldError(f"{path}.volumeMounts[{i}].name", message, "FieldValueNotFound")


def _find_pod_change_errors(new: Object, old: Object) -> Iterator[FieldError]:
    """Yield errors of changes: few fields of a pod's spec may change. The subresource `binding` sets its node."""
    new_spec, old_spec = new["spec"], old["spec"]
    if new_spec is old_spec or new_spec == old_spec:
        return
    mutable = ("activeDeadlineSeconds", "tolerations", "schedulingGates")
    if {**new_spec, **dict.fromkeys(mutable)} != {**old_spec, **dict.fromkeys(mutable)}:
        message = "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,…"
        yield FieldError("spec", message, "FieldValueForbidden")


def _decode_node(body: Object) -> Object:
    """Remove fields that are false or empty."""
    spec = body.get("spec", {})
    empty = [name for name in ("unschedulable", "taints") if name in spec and not spec[name]]
    if not empty and "spec" in body:
        return body
    return {**body, "spec": {name: part for name, part in spec.items() if name not in empty}}


def _find_node_errors(node: Object) -> Iterator[FieldError]:
    effects = ("NoSchedule", "PreferNoSchedule", "NoExecute")
    for i, taint in enumerate(node["spec"].get("taints", ())):
        if taint["effect"] not in effects:
            supported = ", ".join(f'"{effect}"' for effect in effects)
            message = f'Unsupported value: "{taint["effect"]}": supported values: {supported}'
            yield FieldError(f"metadata.taints[{i}].effect", message, "FieldValueNotSupported")


def _find_data_errors(body: Object) -> Iterator[FieldError]:
    if sum(len(value) for value in body.get("data", {}).values()) > MAX_CONFIG_MAP_BYTES:
        yield FieldError("[]", f"Too long: may not be more than {MAX_CONFIG_MAP_BYTES} bytes", "FieldValueTooLong")


# Authorization: the roles of the chart and of its users, and the chart's admission policies.

_TENANT_KINDS = ("pods", "configmaps", "secrets", "events", "networkpolicies", "trainingjobs", "incidents")


def authorize_actor(kind: ServedKind, name: str, verb: str, actor: Actor) -> None:
    """Check the actor's roles. Raises ApiError if they do not allow the request.

    Only users are checked. The operator's rights are the chart's, and are tested on a real cluster.
    """
    allowed = kind.plural in _TENANT_KINDS and (kind.plural != "incidents" or verb == "delete")
    if actor.is_tenant and not allowed:
        raise build_forbidden(kind, name, f'User "{actor.name}" cannot {verb} resource "{kind.plural}"')


def enforce_policies(kind: ServedKind, new: Object | None, old: Object | None, actor: Actor) -> None:
    """Raises ApiError if a policy of the chart denies the operator's replacement of `old` by `new`.

    None: the object is created, or deleted.
    """
    if not actor.operator:
        return
    for policy, find_breach in ADMISSION_POLICIES.get(kind.plural, {}).items():
        breach = find_breach(new, old)
        if breach:
            body = new or old
            assert body is not None
            policy_name = f"pacekeeper-{policy}"
            message = f"ValidatingAdmissionPolicy '{policy_name}' with binding '{policy_name}' denied request: {breach}"
            error = build_forbidden(kind, body["metadata"]["name"], message)
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
        is_node_pod = body["kind"] == "Pod" and not {"NodeQuarantine", "NodeProbe"}.isdisjoint(kinds)
        is_watched_state = body["kind"] == "TrainingJobState" and "WatchedJob" in kinds
        if "TrainingJob" not in kinds and not is_node_pod and not is_watched_state:
            return (
                "the operator may touch only what a TrainingJob controls, the states of WatchedJobs, and in its own "
                "namespace pods that a NodeQuarantine or NodeProbe controls"
            )
    return ""


def _check_node_write(new: Object | None, old: Object | None) -> str:
    if new is None or old is None:
        return ""
    ignored = dict.fromkeys(("taints", "unschedulable"))
    if {**new["spec"], **ignored} != {**old["spec"], **ignored}:
        return "of a node's spec the operator may change only the cordon (unschedulable) and its own taint"
    ignored = dict.fromkeys(("managedFields", "resourceVersion", "generation"))
    if {**new["metadata"], **ignored} != {**old["metadata"], **ignored}:
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
    return "only users decide about the spec of a job: the operator may neither create jobs nor change their spec"


def _check_secret_write(new: Object | None, _: Object | None) -> str:
    makes_token = new is not None and new.get("type") == "kubernetes.io/service-account-token"
    return "the operator makes no tokens" if makes_token else ""


ADMISSION_POLICIES: Mapping[str, Mapping[str, Callable[[Object | None, Object | None], str]]] = {
    "pods": {"owned": _check_ownership},
    "networkpolicies": {"owned": _check_ownership},
    "trainingjobstates": {"owned": _check_ownership},
    "nodes": {"nodes": _check_node_write},
    "trainingjobs": {"jobs": _check_job_write},
    "secrets": {"secrets": _check_secret_write},
}
"""The chart's policies that apply to the operator, by kind, and by their names in the chart."""
POLICIES_NOT_SIMULATED: Mapping[str, str] = {
    "pods": "it constrains texts of pod templates, which unit and cluster tests cover",
    "states": "tenants have no right to write a TrainingJobState in the first place; administrators may",
}
