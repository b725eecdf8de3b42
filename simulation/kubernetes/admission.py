"""What stands between a request and the store: defaults, validation, policies of the chart, quota.

Of the built-in kinds only that is checked which somebody in a simulation may get wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ApiError, Cause, bad_request, forbidden, invalid
from .objects import Kind, Object, bytes_of, without_nulls
from .schema import schema

QUARANTINE_TAINT = "pacekeeper.dev/quarantine"
MAX_REQUEST_BYTES = 3 * 1024 * 1024
MAX_STORED_BYTES = 1_572_864
MAX_CONFIG_MAP_BYTES = 1024 * 1024

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_OF_PODS = """
activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy enableServiceLinks
ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers hostname hostnameOverride imagePullSecrets
initContainers nodeName nodeSelector os overhead preemptionPolicy priority priorityClassName readinessGates
resourceClaims resources restartPolicy runtimeClassName schedulerName schedulingGates schedulingGroup securityContext
serviceAccount serviceAccountName setHostnameAsFQDN shareProcessNamespace subdomain terminationGracePeriodSeconds
tolerations topologySpreadConstraints volumes
"""
_OF_CONTAINERS = """
args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe resizePolicy resources
restartPolicy restartPolicyRules securityContext startupProbe stdin stdinOnce terminationMessagePath
terminationMessagePolicy tty volumeDevices volumeMounts workingDir
"""
_POD_FIELDS, _CONTAINER_FIELDS = frozenset(_OF_PODS.split()), frozenset(_OF_CONTAINERS.split())
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_FINALIZERS = ("foregroundDeletion", "orphan", "kubernetes")
_EVICTED_AFTER = [
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
    def tenant(self) -> bool:
        return self.name.startswith("tenant")


def decoded(kind: Kind, body: Object, *, strict: bool) -> Object:
    """`body` as its kind knows it, with what is filled in. Raises ApiError where it is of another form."""
    unknown: list[str] = []
    if kind.custom:
        body = schema(kind.plural).pruned(body, unknown)
    else:
        body = without_nulls(body)
        if kind.plural == "pods":
            body = _decoded_pod(body, unknown, strict)
        elif kind.plural == "nodes":
            body = _decoded_node(body)
    if strict and unknown:
        words = ", ".join(f'unknown field "{path}"' for path in sorted(unknown))
        version = kind.api_version.rpartition("/")[2]
        raise bad_request(
            f'{kind.name} in version "{version}" cannot be handled as a {kind.name}: strict decoding error: {words}'
        )
    return body


def find_references(kind: Kind, pod: Object) -> None:
    """Raises ApiError where a pod names what does not exist: there are no service accounts and priorities of users."""
    name, spec = pod["metadata"]["name"], pod["spec"]
    namespace = pod["metadata"].get("namespace", "")
    if spec.get("priorityClassName"):
        raise forbidden(kind, name, f"no PriorityClass with name {spec['priorityClassName']} was found")
    account = spec["serviceAccountName"]
    if account != "default":
        why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
        raise forbidden(kind, name, why)


def check(kind: Kind, new: Object, old: Object | None) -> None:
    """Raises ApiError where `new` is not valid, or may not follow `old`."""
    causes = list(_metadata_causes(new, old))
    if kind.custom:
        causes += _custom_causes(kind, new, old)
    elif kind.plural == "pods":
        causes += _pod_causes(new) if old is None else _pod_changes(new, old)
    elif kind.plural == "nodes":
        causes += _node_causes(new)
    elif kind.plural in ("configmaps", "secrets"):
        causes += _data_causes(new)
    if causes:
        raise invalid(kind, new["metadata"]["name"], causes)
    if bytes_of(new) > MAX_STORED_BYTES:
        raise ApiError(500, "", "etcdserver: request is too large")


def _metadata_causes(new: Object, old: Object | None) -> Iterator[Cause]:
    metadata = new["metadata"]
    name = metadata["name"]
    if old is None and (not _SUBDOMAIN.fullmatch(name) or len(name) > 253):
        yield Cause("metadata.name", f'Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist of …')
    labels = metadata.get("labels", {})
    if old is None or labels is not old["metadata"].get("labels"):
        for value in labels.values():
            if len(value) > 63 or not _LABEL_VALUE.fullmatch(value):
                yield Cause("metadata.labels", f'Invalid value: "{value}": a valid label must be an empty string or …')
    before = old["metadata"].get("finalizers", ()) if old is not None else ()
    added = [(i, name) for i, name in enumerate(metadata.get("finalizers", ())) if name not in before]
    for i, name in added:
        if "/" not in name and name not in _FINALIZERS:
            words = f'Invalid value: "{name}": name is neither a standard finalizer name nor is it fully qualified'
            yield Cause(f"metadata.finalizers[{i}]", words)
    if old is not None and "deletionTimestamp" in old["metadata"] and added:
        listed = ", ".join(f'"{name}"' for _, name in added)
        words = "no new finalizers can be added if the object is being deleted, found new finalizers"
        yield Cause("metadata.finalizers", f"Forbidden: {words} []string{{{listed}}}", "FieldValueForbidden")


def _custom_causes(kind: Kind, new: Object, old: Object | None) -> list[Cause]:
    known = schema(kind.plural)
    causes = known.causes(new) if old is None else known.causes(new, old)
    if causes:
        return causes
    return known.broken_rules(new) if old is None else known.broken_rules(new, old)


def _decoded_pod(body: Object, unknown: list[str], strict: bool) -> Object:
    spec = body.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("containers", []), list):
        raise bad_request('Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal')
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
            "containers": [_with_requests(container) for container in spec.get("containers", ())],
            "tolerations": [*own, *(default for default in _EVICTED_AFTER if default["key"] not in keys)],
        },
    }


def _with_requests(container: Object) -> Object:
    """Where only a limit is given, it is also what is requested."""
    resources = container.get("resources", {})
    limits = resources.get("limits")
    if not limits:
        return container
    return {**container, "resources": {**resources, "requests": {**limits, **resources.get("requests", {})}}}


def _pod_causes(pod: Object) -> Iterator[Cause]:
    spec = pod["spec"]
    if not spec["containers"]:
        yield Cause("spec.containers", "Required value", "FieldValueRequired")
    volumes = [volume.get("name") for volume in spec.get("volumes", ())]
    for field in ("initContainers", "containers"):
        for i, container in enumerate(spec.get(field, ())):
            yield from _container_causes(container, f"spec.{field}[{i}]", volumes)
    policies = ("Always", "OnFailure", "Never")
    if spec["restartPolicy"] not in policies:
        listed = ", ".join(f'"{policy}"' for policy in policies)
        words = f'Unsupported value: "{spec["restartPolicy"]}": supported values: {listed}'
        yield Cause("spec.restartPolicy", words, "FieldValueNotSupported")


def _container_causes(container: Object, path: str, volumes: list[Any]) -> Iterator[Cause]:
    name = container.get("name", "")
    if not name:
        yield Cause(f"{path}.name", "Required value", "FieldValueRequired")
    elif not _LABEL.fullmatch(name) or len(name) > 63:
        words = f'Invalid value: "{name}": a lowercase RFC 1123 label must consist of …'
        yield Cause(f"{path}.name", words)
    if not container.get("image"):
        yield Cause(f"{path}.image", "Required value", "FieldValueRequired")
    for i, mount in enumerate(container.get("volumeMounts", ())):
        if mount.get("name") not in volumes:
            words = f'Not found: "{mount.get("name")}"'
            yield Cause(f"{path}.volumeMounts[{i}].name", words, "FieldValueNotFound")


def _pod_changes(new: Object, old: Object) -> Iterator[Cause]:
    """Of a pod's spec little may change. A pod is bound to its node by its subresource `binding`."""
    one, other = new["spec"], old["spec"]
    if one is other or one == other:
        return
    free = ("activeDeadlineSeconds", "tolerations", "schedulingGates")
    if {**one, **dict.fromkeys(free)} != {**other, **dict.fromkeys(free)}:
        words = "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,…"
        yield Cause("spec", words, "FieldValueForbidden")


def _decoded_node(body: Object) -> Object:
    """What is false or empty is not written down."""
    spec = body.get("spec", {})
    empty = [name for name in ("unschedulable", "taints") if name in spec and not spec[name]]
    if not empty and "spec" in body:
        return body
    return {**body, "spec": {name: part for name, part in spec.items() if name not in empty}}


def _node_causes(node: Object) -> Iterator[Cause]:
    effects = ("NoSchedule", "PreferNoSchedule", "NoExecute")
    for i, taint in enumerate(node["spec"].get("taints", ())):
        if taint["effect"] not in effects:
            listed = ", ".join(f'"{effect}"' for effect in effects)
            words = f'Unsupported value: "{taint["effect"]}": supported values: {listed}'
            yield Cause(f"metadata.taints[{i}].effect", words, "FieldValueNotSupported")


def _data_causes(body: Object) -> Iterator[Cause]:
    if sum(len(value) for value in body.get("data", {}).values()) > MAX_CONFIG_MAP_BYTES:
        yield Cause("[]", f"Too long: may not be more than {MAX_CONFIG_MAP_BYTES} bytes", "FieldValueTooLong")


# Who may write what: the roles of the chart and of its users, and its admission policies.

_OF_TENANTS = ("pods", "configmaps", "secrets", "events", "networkpolicies", "trainingjobs", "incidents")


def authorize(kind: Kind, name: str, verb: str, actor: Actor) -> None:
    """Raises ApiError where the actor's roles do not allow it. Of tenants only: the operator's rights are those of its
    chart, which tests on a real cluster prove."""
    allowed = kind.plural in _OF_TENANTS and (kind.plural != "incidents" or verb == "delete")
    if actor.tenant and not allowed:
        raise forbidden(kind, name, f'User "{actor.name}" cannot {verb} resource "{kind.plural}"')


def police(kind: Kind, new: Object | None, old: Object | None, actor: Actor) -> None:
    """Raises ApiError where a policy of the chart denies that the operator makes `new` of `old` (None: it is created,
    or deleted)."""
    if not actor.operator:
        return
    for policy in POLICIES.get(kind.plural, ()):
        why = policy(new, old)
        if why:
            body = new or old
            assert body is not None
            title = f"pacekeeper-{policy.__name__.strip('_')}"
            words = f"ValidatingAdmissionPolicy '{title}' with binding '{title}' denied request: {why}"
            error = forbidden(kind, body["metadata"]["name"], words)
            raise ApiError(422, "Invalid", error.message, error.details)


def _owned(new: Object | None, old: Object | None) -> str:
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


def _nodes(new: Object | None, old: Object | None) -> str:
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


def _jobs(new: Object | None, old: Object | None) -> str:
    if new is None or (old is not None and new["spec"] == old["spec"]):
        return ""
    return "what is wanted of a job is its users' to say: the operator neither makes jobs nor changes their spec"


def _secrets(new: Object | None, _: Object | None) -> str:
    makes_token = new is not None and new.get("type") == "kubernetes.io/service-account-token"
    return "the operator makes no tokens" if makes_token else ""


def _plans(new: Object | None, old: Object | None) -> str:
    if new is None and old is not None:
        metadata = old["metadata"]
        job = metadata.get("labels", {}).get("pacekeeper.dev/job", "")
        owners = [owner["name"] for owner in metadata.get("ownerReferences", ()) if owner["kind"] == "TrainingJob"]
        if job in owners and metadata["name"] == f"{job}-plan":
            return ""
    return "of all ConfigMaps the operator may delete only the plans of jobs from before there were TrainingJobStates"


POLICIES: Mapping[str, tuple[Callable[[Object | None, Object | None], str], ...]] = {
    "pods": (_owned,),
    "networkpolicies": (_owned,),
    "trainingjobstates": (_owned,),
    "nodes": (_nodes,),
    "trainingjobs": (_jobs,),
    "secrets": (_secrets,),
    "configmaps": (_plans,),
}
"""Those of the chart that bind the operator, by the kind that they are about: owned, nodes, jobs, secrets, plans."""
POLICIES_NOT_SIMULATED: Mapping[str, str] = {
    "pods": "what a template may have of its node is a question of text, which unit and cluster tests ask",
    "states": "tenants have no right to write a TrainingJobState in the first place; administrators may",
}
