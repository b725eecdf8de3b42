"""Probes of an API server's behavior that the operator relies on: each makes a few requests, and returns the results.

They run against the simulated API server and the real one, with the same results. What differs between any two runs
(uids, versions, times) is left out of the results; `@probe(…)` holds what is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Object = dict[str, Any]
MERGE_PATCH_TYPE, JSON_PATCH_TYPE = "application/merge-patch+json", "application/json-patch+json"
APPLY_PATCH_TYPE = "application/apply-patch+yaml"
GROUP = "pacekeeper.dev/v1alpha1"
_KIND_PATHS: Mapping[str, tuple[str, bool]] = {
    "pods": ("/api/v1", True),
    "configmaps": ("/api/v1", True),
    "resourcequotas": ("/api/v1", True),
    "nodes": ("/api/v1", False),
    "namespaces": ("/api/v1", False),
    "leases": ("/apis/coordination.k8s.io/v1", True),
    "tokenreviews": ("/apis/authentication.k8s.io/v1", False),
    "networkpolicies": ("/apis/networking.k8s.io/v1", True),
    "trainingjobs": (f"/apis/{GROUP}", True),
    "trainingjobstates": (f"/apis/{GROUP}", True),
    "incidents": (f"/apis/{GROUP}", True),
    "nodequarantines": (f"/apis/{GROUP}", False),
    "fabrics": (f"/apis/{GROUP}", False),
}


class ProbedServer(Protocol):
    """An API server, as an administrator reaches it."""

    namespace: str
    """For what the probes make."""

    def request(
        self, method: str, path: str, query: Mapping[str, str], body: Any, style: str
    ) -> tuple[int, Object]: ...

    def pause(self, seconds: float) -> None:
        """Time passes there."""

    def create_token(self, pod: Object, audience: str) -> str:
        """Of the pod's service account, bound to it."""

    def list_changes(self, path: str, query: Mapping[str, str]) -> list[tuple[str, Object]]:
        """The events of a watch with this query within a second, bookmarks aside."""


@dataclass(frozen=True)
class ProbeAnswer:
    """An answer."""

    status: int
    body: Object

    def __str__(self) -> str:
        """In short: the status, and of an error its reason and the fields that it is about."""
        if self.status < 300:
            return str(self.status)
        causes = (self.body.get("details") or {}).get("causes", ())
        fields = sorted({cause["field"].lstrip(".") for cause in causes if not _is_secondary_cause(cause)})
        return " ".join([str(self.status), self.body.get("reason") or "-", *fields])

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))

    @property
    def metadata(self) -> Object:
        metadata: Object = self.body["metadata"]
        return metadata

    @property
    def version(self) -> str:
        return str(self.metadata["resourceVersion"])


def _is_secondary_cause(cause: Mapping[str, str]) -> bool:
    """The real server reports one fault of a type twice, and that it has checked no further."""
    return "some validation rules were not checked" in cause["message"] or "Checked value must be" in cause["message"]


class ProbeClient:
    """A server, with shorter calls."""

    def __init__(self, server: ProbedServer) -> None:
        self.server = server

    def build_path(self, plural: str, name: str = "", subresource: str = "", namespace: str | None = None) -> str:
        prefix, namespaced = _KIND_PATHS[plural]
        namespace_name = self.server.namespace if namespace is None else namespace
        parts = [prefix, *(["namespaces", namespace_name] if namespaced else []), plural, name, subresource]
        return "/".join(part for part in parts if part)

    def create(self, plural: str, body: Object, namespace: str | None = None, **query: str) -> ProbeAnswer:
        payload = {"apiVersion": _get_version(plural), "kind": _KINDS[plural], **body}
        path = self.build_path(plural, namespace=namespace)
        return ProbeAnswer(
            *self.server.request("POST", path, {"fieldManager": "probe", **query}, payload, "application/json")
        )

    def get(self, plural: str, name: str, namespace: str | None = None) -> ProbeAnswer:
        return ProbeAnswer(
            *self.server.request("GET", self.build_path(plural, name, "", namespace), {}, None, "application/json")
        )

    def list_objects(self, plural: str, **query: str) -> ProbeAnswer:
        return ProbeAnswer(*self.server.request("GET", self.build_path(plural), query, None, "application/json"))

    def replace(self, plural: str, name: str, body: Object) -> ProbeAnswer:
        payload = {"apiVersion": _get_version(plural), "kind": _KINDS[plural], **body}
        query = {"fieldManager": "probe"}
        return ProbeAnswer(
            *self.server.request("PUT", self.build_path(plural, name), query, payload, "application/json")
        )

    def patch(
        self,
        plural: str,
        name: str,
        body: Any,
        subresource: str = "",
        manager: str = "probe",
        style: str = MERGE_PATCH_TYPE,
    ) -> ProbeAnswer:
        path = self.build_path(plural, name, subresource)
        return ProbeAnswer(*self.server.request("PATCH", path, {"fieldManager": manager}, body, style))

    def apply(
        self, plural: str, name: str, body: Object, manager: str, subresource: str = "", *, force: bool = True
    ) -> ProbeAnswer:
        metadata = {"name": name, **body.get("metadata", {})}
        payload = {"apiVersion": _get_version(plural), "kind": _KINDS[plural], **body, "metadata": metadata}
        query = {"fieldManager": manager} | ({"force": "true"} if force else {})
        return ProbeAnswer(
            *self.server.request("PATCH", self.build_path(plural, name, subresource), query, payload, APPLY_PATCH_TYPE)
        )

    def delete(self, plural: str, name: str, namespace: str | None = None, **options: Any) -> ProbeAnswer:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        path = self.build_path(plural, name, "", namespace)
        return ProbeAnswer(*self.server.request("DELETE", path, {}, body, "application/json"))

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> bool:
        """Whether it comes true in this many seconds."""
        remaining = seconds
        while not condition():
            if remaining <= 0:
                return False
            self.server.pause(0.05)
            remaining -= 0.05
        return True

    def wait_until_gone(self, plural: str, name: str) -> bool:
        return self.wait_until(lambda: self.get(plural, name).status == 404)

    def list_changes(self, plural: str, since: str, labels: str = "", namespace: str | None = None) -> list[str]:
        """The events of a watch since a version, in order: type and name."""
        query = {"resourceVersion": since} | ({"labelSelector": labels} if labels else {})
        changes = self.server.list_changes(self.build_path(plural, namespace=namespace), query)
        return [f"{type} {body['metadata'].get('name', body.get('code'))}" for type, body in changes]


@dataclass(frozen=True)
class ApiProbe:
    """One of them, and its expected results."""

    run: Callable[[ProbeClient], Sequence[object]]
    expected: tuple[object, ...]

    @property
    def name(self) -> str:
        return self.run.__name__

    def run_on(self, server: ProbedServer) -> tuple[object, ...]:
        return tuple(str(value) if isinstance(value, ProbeAnswer) else value for value in self.run(ProbeClient(server)))


PROBES: list[ApiProbe] = []


def register_probe(
    *expected: object,
) -> Callable[[Callable[[ProbeClient], Sequence[object]]], Callable[[ProbeClient], Sequence[object]]]:
    """Registers a probe."""

    def register(run: Callable[[ProbeClient], Sequence[object]]) -> Callable[[ProbeClient], Sequence[object]]:
        PROBES.append(ApiProbe(run, expected))
        return run

    return register


_KINDS = {
    "pods": "Pod",
    "configmaps": "ConfigMap",
    "resourcequotas": "ResourceQuota",
    "nodes": "Node",
    "namespaces": "Namespace",
    "leases": "Lease",
    "tokenreviews": "TokenReview",
    "networkpolicies": "NetworkPolicy",
    "trainingjobs": "TrainingJob",
    "trainingjobstates": "TrainingJobState",
    "incidents": "Incident",
    "nodequarantines": "NodeQuarantine",
    "fabrics": "Fabric",
}


def _get_version(plural: str) -> str:
    prefix = _KIND_PATHS[plural][0]
    return prefix.removeprefix("/apis/").removeprefix("/api/")


def build_config_map(name: str, data: Mapping[str, str] | None = None, **metadata: Any) -> Object:
    return {"metadata": {"name": name, **metadata}, **({"data": dict(data)} if data else {})}


def build_pod(name: str, **spec: Any) -> Object:
    """One that no node takes."""
    return {
        "metadata": {"name": name},
        "spec": {
            "containers": [{"name": "one", "image": "none"}],
            "nodeSelector": {"pacekeeper.dev/nowhere": "yes"},
            **spec,
        },
    }


def build_bound_pod(name: str, **spec: Any) -> Object:
    """One that is on a node without a kubelet."""
    return build_pod(name, nodeName="nowhere", **spec)


def build_job(name: str, **spec: Any) -> Object:
    template = {"spec": {"containers": [{"name": "trainer", "image": "none"}]}}
    return {"metadata": {"name": name}, "spec": {"template": template, "suspend": True, **spec}}


def build_incident(name: str, **metadata: Any) -> Object:
    spec = {"jobRef": {"name": "a", "uid": "b"}, "cause": "crash", "class": "Application"}
    return {"metadata": {"name": name, **metadata}, "spec": spec}


def build_state(name: str, **metadata: Any) -> Object:
    return {"metadata": {"name": name, **metadata}, "schemaVersion": 1, "plan": {}, "state": {}}


def build_quarantine(name: str, **spec: Any) -> Object:
    return {"metadata": {"name": name}, "spec": {"reason": "a probe", **spec}}


def build_owner_reference(kind: str, owner: ProbeAnswer, **fields: Any) -> Object:
    metadata = owner.metadata
    return {
        "apiVersion": owner.body["apiVersion"],
        "kind": kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
        **fields,
    }


def list_managers(answer: ProbeAnswer, field: str) -> list[str]:
    """Who owns a field of the first level below data, spec or metadata, as (name operation)."""
    section, key = field.split(".", 1)
    return sorted(
        f"{entry['manager']} {entry['operation']}"
        for entry in answer.metadata.get("managedFields", ())
        if f"f:{key}" in entry["fieldsV1"].get(f"f:{section}", {})
    )


# Versions and conflicts


@register_probe("201", "409 AlreadyExists", 'configmaps "twice" already exists')
def creating_twice(api: ProbeClient) -> Sequence[object]:
    first, second = (
        api.create("configmaps", build_config_map("twice")),
        api.create("configmaps", build_config_map("twice")),
    )
    return first, second, second.message


@register_probe("404 NotFound", 'configmaps "missing" not found', "404 NotFound", "404 NotFound", "404 NotFound")
def what_is_not_there(api: ProbeClient) -> Sequence[object]:
    missing = api.get("configmaps", "missing")
    patched = api.patch("configmaps", "missing", {"data": {"a": "b"}})
    replaced = api.replace("configmaps", "missing", build_config_map("missing"))
    return missing, missing.message, patched, replaced, api.delete("configmaps", "missing")


@register_probe("409 Conflict", "200", True, "409 Conflict")
def replacing_an_old_version(api: ProbeClient) -> Sequence[object]:
    first = api.create("trainingjobstates", build_state("stale"))
    old = {**first.body, "metadata": {**first.metadata, "resourceVersion": "1"}}
    stale = api.replace("trainingjobstates", "stale", old)
    second = api.replace("trainingjobstates", "stale", {**first.body, "plan": {"a": 1}})
    repeated = api.replace("trainingjobstates", "stale", {**first.body, "plan": {"a": 2}})
    return stale, second, int(second.version) > int(first.version), repeated


@register_probe("422 Invalid metadata.resourceVersion", "422 Invalid metadata.resourceVersion", "200")
def replacing_without_a_version(api: ProbeClient) -> Sequence[object]:
    api.create("trainingjobstates", build_state("anyhow"))
    api.create("leases", {"metadata": {"name": "anyhow"}, "spec": {}})
    api.create("configmaps", build_config_map("anyhow"))
    return (
        api.replace("trainingjobstates", "anyhow", build_state("anyhow")),
        api.replace("leases", "anyhow", {"metadata": {"name": "anyhow"}, "spec": {"holderIdentity": "x"}}),
        api.replace("configmaps", "anyhow", build_config_map("anyhow", {"a": "b"})),
    )


@register_probe("404 NotFound", "404 NotFound", "201", "201")
def replacing_what_is_gone(api: ProbeClient) -> Sequence[object]:
    """A Lease that was deleted comes back by a replacement of what was read before."""
    body = {**build_state("vanished"), "metadata": {"name": "vanished", "resourceVersion": "7"}}
    lease = {"metadata": {"name": "vanished", "resourceVersion": "7"}, "spec": {"holderIdentity": "x"}}
    unversioned = {"metadata": {"name": "vanished-2"}, "spec": {"holderIdentity": "x"}}
    return (
        api.replace("trainingjobstates", "vanished", body),
        api.replace("trainingjobstates", "vanished", build_state("vanished")),
        api.replace("leases", "vanished", lease),
        api.replace("leases", "vanished-2", unversioned),
    )


@register_probe("409 Conflict", "409 Conflict")
def replacing_a_namesake(api: ProbeClient) -> Sequence[object]:
    first = api.create("trainingjobstates", build_state("namesake"))
    other_uid = {**first.body, "metadata": {**first.metadata, "uid": "another"}}
    api.delete("trainingjobstates", "namesake")
    second = api.create("trainingjobstates", build_state("namesake"))
    return (
        api.replace("trainingjobstates", "namesake", first.body),
        api.replace("trainingjobstates", "namesake", {**other_uid, "metadata": {**second.metadata, "uid": "another"}}),
    )


@register_probe("400 BadRequest", "400 BadRequest")
def another_name_than_the_paths(api: ProbeClient) -> Sequence[object]:
    first = api.create("configmaps", build_config_map("named"))
    renamed = {**first.body, "metadata": {**first.metadata, "name": "other"}}
    return (
        api.replace("configmaps", "named", renamed),
        api.create("configmaps", build_config_map("elsewhere", namespace="another-place")),
    )


@register_probe("409 Conflict", "200", "422 Invalid metadata.uid", "200")
def patching_a_certain_version(api: ProbeClient) -> Sequence[object]:
    first = api.create("configmaps", build_config_map("certain"))
    version = {"resourceVersion": first.version}
    return (
        api.patch("configmaps", "certain", {"metadata": {"resourceVersion": "1"}, "data": {"a": "1"}}),
        api.patch("configmaps", "certain", {"metadata": version, "data": {"a": "1"}}),
        api.patch("configmaps", "certain", {"metadata": {"uid": "another"}, "data": {"a": "2"}}),
        api.patch("configmaps", "certain", {"data": {"a": "3"}}),
    )


@register_probe("200", True, True, True, [])
def writing_what_is_there_already(api: ProbeClient) -> Sequence[object]:
    first = api.create("configmaps", build_config_map("same", {"a": "1"}, labels={"probe": "same"}))
    patched = api.patch("configmaps", "same", {"data": {"a": "1"}})
    replaced = api.replace("configmaps", "same", first.body)
    deleted = api.patch("configmaps", "same", {"data": {"nothing": None}})
    changes = api.list_changes("configmaps", first.version, "probe=same")
    unchanged = [answer.version == first.version for answer in (patched, replaced, deleted)]
    return patched, *unchanged, changes


@register_probe("500 -", "201", True, True, None)
def system_fields_at_creation(api: ProbeClient) -> Sequence[object]:
    fields = {"uid": "mine", "creationTimestamp": "2020-01-01T00:00:00Z", "deletionTimestamp": "2020-01-01T00:00:00Z"}
    versioned = api.create("configmaps", build_config_map("systematic", resourceVersion="5"))
    created = api.create("configmaps", build_config_map("systematic", None, **fields))
    metadata = created.metadata
    is_recent = metadata["creationTimestamp"] > "2021"
    return versioned, created, metadata["uid"] != "mine", is_recent, metadata.get("deletionTimestamp")


@register_probe("200", True, True)
def system_fields_in_a_patch(api: ProbeClient) -> Sequence[object]:
    first = api.create("configmaps", build_config_map("unsystematic"))
    nulls = dict.fromkeys(("uid", "creationTimestamp", "resourceVersion"))
    patched = api.patch("configmaps", "unsystematic", {"metadata": {**nulls, "generation": 9}})
    return patched, patched.metadata["uid"] == first.metadata["uid"], patched.version == first.version


@register_probe({"name": "bare"}, None)
def empty_metadata_is_not_kept(api: ProbeClient) -> Sequence[object]:
    empty: Object = {"labels": {}, "annotations": {}, "finalizers": [], "ownerReferences": []}
    created = api.create("configmaps", build_config_map("bare", **empty))
    remaining = {name: value for name, value in created.metadata.items() if name in ("name", *empty)}
    return remaining, created.body.get("data")


# Names, sizes, places


@register_probe("422 Invalid metadata.name", "422 Invalid metadata.name", "422 Invalid metadata.finalizers[0]")
def names_that_are_none(api: ProbeClient) -> Sequence[object]:
    return (
        api.create("configmaps", build_config_map("Not_a_name")),
        api.create("configmaps", {"metadata": {}}),
        api.create("configmaps", build_config_map("ended", finalizers=["unserved"])),
    )


@register_probe("422 Invalid metadata.labels", "422 Invalid metadata.labels")
def labels_that_are_none(api: ProbeClient) -> Sequence[object]:
    return (
        api.create("configmaps", build_config_map("labeled", labels={"a": "b c"})),
        api.create("configmaps", build_config_map("labeled", labels={"a": "b" * 64})),
    )


@register_probe("422 Invalid []", "500 -", "413 RequestEntityTooLarge")
def too_much_at_once(api: ProbeClient) -> Sequence[object]:
    return (
        api.create("configmaps", build_config_map("big", {"a": "b" * 1_100_000})),
        api.create("trainingjobstates", {**build_state("big"), "plan": {"a": "b" * 1_600_000}}),
        api.create("trainingjobstates", {**build_state("big"), "plan": {"a": "b" * 3_200_000}}),
    )


@register_probe("404 NotFound", 'namespaces "no-such-place" not found')
def nowhere(api: ProbeClient) -> Sequence[object]:
    created = api.create("configmaps", build_config_map("lost"), namespace="no-such-place")
    return created, created.message


@register_probe("200", "Terminating", "403 Forbidden metadata.namespace", "403 Forbidden metadata.namespace", "200")
def a_namespace_that_ends(api: ProbeClient) -> Sequence[object]:
    namespace = f"{api.server.namespace}-ends"
    api.create("namespaces", {"metadata": {"name": namespace}})
    api.create("configmaps", build_config_map("stays", finalizers=["pacekeeper.dev/probe"]), namespace=namespace)
    deleted = api.delete("namespaces", namespace)
    created = api.create("configmaps", build_config_map("late"), namespace=namespace)
    dry_run = api.create("configmaps", build_config_map("late"), namespace=namespace, dryRun="All")
    path = api.build_path("configmaps", "stays", namespace=namespace)
    finalizer_removed = ProbeAnswer(
        *api.server.request("PATCH", path, {}, {"metadata": {"finalizers": None}}, MERGE_PATCH_TYPE)
    )
    return deleted, deleted.body["status"]["phase"], created, dry_run, finalizer_removed


# Selectors


@register_probe(["chosen-1", "chosen-2"], ["chosen-1"], ["chosen-2"], ["chosen-1"], ["chosen-2"])
def selecting_by_labels(api: ProbeClient) -> Sequence[object]:
    api.create("configmaps", build_config_map("chosen-1", labels={"probe": "chosen", "number": "1"}))
    api.create("configmaps", build_config_map("chosen-2", labels={"probe": "chosen", "number": "2", "even": "yes"}))
    selectors = ("", ",number=1", ",number!=1", ",!even", ",number in (2,3)")
    answers = [api.list_objects("configmaps", labelSelector=f"probe=chosen{selector}") for selector in selectors]
    return [[body["metadata"]["name"] for body in answer.body["items"]] for answer in answers]


@register_probe(["placed-1"], ["placed-2"], "400 BadRequest")
def selecting_by_fields(api: ProbeClient) -> Sequence[object]:
    api.create("pods", build_bound_pod("placed-1"))
    api.create("pods", build_pod("placed-2"))
    by_node = api.list_objects("pods", fieldSelector="spec.nodeName=nowhere,metadata.name=placed-1")
    by_name = api.list_objects("pods", fieldSelector="metadata.name=placed-2")
    refused = api.list_objects("configmaps", fieldSelector="spec.nodeName=nowhere")
    names = [[body["metadata"]["name"] for body in answer.body["items"]] for answer in (by_node, by_name)]
    for name in ("placed-1", "placed-2"):
        api.delete("pods", name, gracePeriodSeconds=0)
    return *names, refused


@register_probe(["listed-a", "listed-b"], True)
def lists_are_in_the_order_of_names(api: ProbeClient) -> Sequence[object]:
    api.create("configmaps", build_config_map("listed-b", labels={"probe": "listed"}))
    last = api.create("configmaps", build_config_map("listed-a", labels={"probe": "listed"}))
    listed = api.list_objects("configmaps", labelSelector="probe=listed")
    return [body["metadata"]["name"] for body in listed.body["items"]], int(listed.version) >= int(last.version)


# Generations and the status subresource


@register_probe(1, 1, "200", 2)
def generations_of_what_has_a_status(api: ProbeClient) -> Sequence[object]:
    first = api.create("nodequarantines", build_quarantine("probe-generation"))
    labeled = api.patch("nodequarantines", "probe-generation", {"metadata": {"labels": {"a": "b"}}})
    changed = api.patch("nodequarantines", "probe-generation", {"spec": {"approved": True}})
    api.delete("nodequarantines", "probe-generation")
    return first.metadata["generation"], labeled.metadata["generation"], changed, changed.metadata["generation"]


@register_probe(1, 1, 2)
def generations_of_what_has_none(api: ProbeClient) -> Sequence[object]:
    first = api.create("trainingjobstates", build_state("generations"))
    labeled = api.patch("trainingjobstates", "generations", {"metadata": {"labels": {"a": "b"}}})
    changed = api.patch("trainingjobstates", "generations", {"plan": {"a": 1}})
    return first.metadata["generation"], labeled.metadata["generation"], changed.metadata["generation"]


@register_probe(None, "200", None, True)
def status_by_the_wrong_way(api: ProbeClient) -> Sequence[object]:
    body = {**build_incident("status-1"), "status": {"mode": "Act"}}
    created = api.create("incidents", body)
    patched = api.patch("incidents", "status-1", {"status": {"mode": "Act"}})
    return created.body.get("status"), patched, patched.body.get("status"), patched.version == created.version


@register_probe({"observedGeneration": -1}, {"observedGeneration": -1}, {"step": 3}, {"observedGeneration": -1})
def a_status_that_has_a_default(api: ProbeClient) -> Sequence[object]:
    created = api.create("trainingjobs", {**build_job("status-0"), "status": {"step": 7}})
    fetched = api.get("trainingjobs", "status-0")
    patched = api.patch("trainingjobs", "status-0", {"status": {"observedGeneration": None, "step": 3}}, "status")
    cleared = api.patch("trainingjobs", "status-0", {"status": None}, "status")
    return (
        created.body["status"],
        fetched.body["status"],
        patched.body["status"],
        cleared.body["status"],
    )


@register_probe("200", {"mode": "Act"}, "crash", None, 1)
def status_by_the_right_way(api: ProbeClient) -> Sequence[object]:
    api.create("incidents", build_incident("status-2"))
    body = {"status": {"mode": "Act"}, "spec": {"cause": "hang"}, "metadata": {"labels": {"a": "b"}}}
    patched = api.patch("incidents", "status-2", body, "status")
    stored = patched.body
    return (
        patched,
        stored["status"],
        stored["spec"]["cause"],
        patched.metadata.get("labels"),
        patched.metadata["generation"],
    )


@register_probe("409 Conflict", "200")
def status_at_a_certain_version(api: ProbeClient) -> Sequence[object]:
    created = api.create("incidents", build_incident("status-3"))
    stale = {"metadata": {"resourceVersion": "1"}, "status": {"mode": "Act"}}
    fresh = {"metadata": {"resourceVersion": created.version}, "status": {"mode": "Act"}}
    return api.patch("incidents", "status-3", stale, "status"), api.patch("incidents", "status-3", fresh, "status")


@register_probe("404 NotFound")
def status_of_what_has_none(api: ProbeClient) -> Sequence[object]:
    api.create("trainingjobstates", build_state("no-status"))
    return (api.patch("trainingjobstates", "no-status", {"status": {"a": 1}}, "status"),)


@register_probe({"phase": "Pending"}, "Running", "Running", {"a": "b"})
def status_of_pods(api: ProbeClient) -> Sequence[object]:
    """Unlike that of custom resources it can be written with labels."""
    manifest = {**build_pod("status-pod"), "status": {"phase": "Failed"}}
    created = api.create("pods", manifest)
    patch = {"status": {"phase": "Running"}, "metadata": {"labels": {"a": "b"}}}
    patched = api.patch("pods", "status-pod", patch, "status")
    main_patched = api.patch("pods", "status-pod", {"status": {"phase": "Failed"}})
    api.delete("pods", "status-pod", gracePeriodSeconds=0)
    phases = [answer.body["status"]["phase"] for answer in (patched, main_patched)]
    return {"phase": created.body["status"]["phase"]}, *phases, main_patched.metadata.get("labels")


# Finalizers and deletion


@register_probe("200", True, 0, 2, "200", "404 NotFound")
def a_finalizer_holds(api: ProbeClient) -> Sequence[object]:
    api.create("incidents", build_incident("held", finalizers=["pacekeeper.dev/probe"]))
    deleted = api.delete("incidents", "held")
    repeated = api.delete("incidents", "held")
    metadata = repeated.metadata
    finalizer_removed = api.patch("incidents", "held", {"metadata": {"finalizers": None}})
    return (
        deleted,
        "deletionTimestamp" in metadata,
        metadata["deletionGracePeriodSeconds"],
        metadata["generation"],
        finalizer_removed,
        api.get("incidents", "held"),
    )


@register_probe("422 Invalid metadata.finalizers", "200", "200", "404 NotFound")
def no_new_finalizer_on_what_is_being_deleted(api: ProbeClient) -> Sequence[object]:
    finalizers = ["pacekeeper.dev/one", "pacekeeper.dev/two"]
    api.create("incidents", build_incident("ending", finalizers=finalizers))
    api.delete("incidents", "ending")
    return (
        api.patch("incidents", "ending", {"metadata": {"finalizers": [*finalizers, "pacekeeper.dev/three"]}}),
        api.patch("incidents", "ending", {"metadata": {"finalizers": finalizers[:1]}}),
        api.patch("incidents", "ending", {"metadata": {"finalizers": []}}),
        api.get("incidents", "ending"),
    )


@register_probe("200", {"mode": "Act"}, "200")
def what_is_being_deleted_can_be_written(api: ProbeClient) -> Sequence[object]:
    api.create("incidents", build_incident("dying", finalizers=["pacekeeper.dev/probe"]))
    api.delete("incidents", "dying")
    patched = api.patch("incidents", "dying", {"status": {"mode": "Act"}}, "status")
    finalizer_removed = api.patch("incidents", "dying", {"metadata": {"finalizers": None}})
    return patched, patched.body["status"], finalizer_removed


@register_probe("422 Invalid", "200", ["pacekeeper.dev/probe"])
def a_finalizer_by_json_patch(api: ProbeClient) -> Sequence[object]:
    """As kopf writes it: a test of the version goes first."""
    created = api.create("incidents", build_incident("patched"))
    add = {"op": "add", "path": "/metadata/finalizers", "value": ["pacekeeper.dev/probe"]}
    test = {"op": "test", "path": "/metadata/resourceVersion", "value": "1"}
    stale = api.patch("incidents", "patched", [test, add], style=JSON_PATCH_TYPE)
    fresh = api.patch("incidents", "patched", [{**test, "value": created.version}, add], style=JSON_PATCH_TYPE)
    api.patch("incidents", "patched", {"metadata": {"finalizers": None}})
    return stale, fresh, fresh.metadata["finalizers"]


@register_probe("409 Conflict", "409 Conflict", "200", "404 NotFound")
def deletion_with_preconditions(api: ProbeClient) -> Sequence[object]:
    created = api.create("configmaps", build_config_map("meant"))
    return (
        api.delete("configmaps", "meant", preconditions={"uid": "another"}),
        api.delete("configmaps", "meant", preconditions={"resourceVersion": "1"}),
        api.delete("configmaps", "meant", preconditions={"uid": created.metadata["uid"]}),
        api.delete("configmaps", "meant", preconditions={"uid": created.metadata["uid"]}),
    )


@register_probe("Status Success", "Status Success", "Pod")
def what_a_deletion_answers(api: ProbeClient) -> Sequence[object]:
    api.create("configmaps", build_config_map("answered"))
    api.create("incidents", build_incident("answered"))
    api.create("pods", build_pod("answered"))
    bodies = [api.delete(plural, "answered").body for plural in ("configmaps", "incidents", "pods")]
    return [
        f"{body['kind']} {body['status']}" if isinstance(body.get("status"), str) else body["kind"] for body in bodies
    ]


@register_probe(["MODIFIED traced", "MODIFIED traced", "DELETED traced"])
def events_of_a_deletion_with_a_finalizer(api: ProbeClient) -> Sequence[object]:
    """The write that takes the last finalizer is reported only as the deletion."""
    created = api.create("incidents", build_incident("traced", labels={"probe": "traced"}))
    api.patch("incidents", "traced", {"metadata": {"finalizers": ["pacekeeper.dev/probe"]}})
    api.delete("incidents", "traced")
    api.patch("incidents", "traced", {"metadata": {"finalizers": None}})
    return (api.list_changes("incidents", created.version, "probe=traced"),)


# Pods


@register_probe("201", "Pending", 30, "Never", [("not-ready", 300), ("unreachable", 300)])
def defaults_of_pods(api: ProbeClient) -> Sequence[object]:
    created = api.create("pods", build_pod("defaults", restartPolicy="Never"))
    api.delete("pods", "defaults")
    spec = created.body["spec"]
    tolerations = [(t["key"].removeprefix("node.kubernetes.io/"), t["tolerationSeconds"]) for t in spec["tolerations"]]
    phase = created.body["status"]["phase"]
    return created, phase, spec["terminationGracePeriodSeconds"], spec["restartPolicy"], tolerations


@register_probe("200", "404 NotFound")
def an_unplaced_pod_goes_at_once(api: ProbeClient) -> Sequence[object]:
    api.create("pods", build_pod("unplaced"))
    return api.delete("pods", "unplaced", gracePeriodSeconds=20), api.get("pods", "unplaced")


@register_probe("200", "404 NotFound")
def an_ended_pod_goes_at_once(api: ProbeClient) -> Sequence[object]:
    api.create("pods", build_bound_pod("finished"))
    api.patch("pods", "finished", {"status": {"phase": "Failed"}}, "status")
    return api.delete("pods", "finished"), api.get("pods", "finished")


@register_probe((30, 30), (30, 30), (20, 20), (20, 20), 2, "200", "404 NotFound")
def a_placed_pod_goes_gracefully(api: ProbeClient) -> Sequence[object]:
    """Each time: the grace, and how long after the first deletion it ends. It can only become shorter."""
    api.create("pods", build_bound_pod("graceful"))
    initial = api.get("pods", "graceful")
    observed = []
    start = 0
    for requested in (None, 90, 20, None):
        metadata = api.delete("pods", "graceful", gracePeriodSeconds=requested).metadata
        deadline, grace = _parse_second(metadata["deletionTimestamp"]), metadata["deletionGracePeriodSeconds"]
        start = start or deadline - grace
        observed.append((grace, deadline - start))
    generation = api.get("pods", "graceful").metadata["generation"]
    assert initial.metadata["generation"] == 1
    return *observed, generation, api.delete("pods", "graceful", gracePeriodSeconds=0), api.get("pods", "graceful")


@register_probe("200", "200", "404 NotFound")
def an_ended_pod_that_is_being_deleted_waits_for_its_kubelet(api: ProbeClient) -> Sequence[object]:
    api.create("pods", build_bound_pod("waits"))
    api.delete("pods", "waits")
    api.patch("pods", "waits", {"status": {"phase": "Failed"}}, "status")
    api.delete("pods", "waits")
    fetched = api.get("pods", "waits")
    return fetched, api.delete("pods", "waits", gracePeriodSeconds=0), api.get("pods", "waits")


@register_probe("200", "200", "200", "200", "404 NotFound")
def a_pod_with_a_finalizer(api: ProbeClient) -> Sequence[object]:
    api.create(
        "pods", {**build_bound_pod("bolted"), "metadata": {"name": "bolted", "finalizers": ["pacekeeper.dev/probe"]}}
    )
    return (
        api.delete("pods", "bolted", gracePeriodSeconds=5),
        api.delete("pods", "bolted", gracePeriodSeconds=0),
        api.get("pods", "bolted"),
        api.patch("pods", "bolted", {"metadata": {"finalizers": None}}),
        api.get("pods", "bolted"),
    )


@register_probe("200", "200")
def a_pod_whose_finalizer_goes_within_its_grace(api: ProbeClient) -> Sequence[object]:
    api.create(
        "pods", {**build_bound_pod("loose"), "metadata": {"name": "loose", "finalizers": ["pacekeeper.dev/probe"]}}
    )
    api.delete("pods", "loose", gracePeriodSeconds=60)
    finalizer_removed = api.patch("pods", "loose", {"metadata": {"finalizers": None}})
    fetched = api.get("pods", "loose")
    api.delete("pods", "loose", gracePeriodSeconds=0)
    return finalizer_removed, fetched


@register_probe(["ADDED forced", "MODIFIED forced", "DELETED forced"])
def events_of_a_forced_deletion(api: ProbeClient) -> Sequence[object]:
    """Also where no grace is given, watches receive the deletion first."""
    since = api.list_objects("pods").version
    body = build_bound_pod("forced")
    api.create("pods", {**body, "metadata": {"name": "forced", "labels": {"probe": "forced"}}})
    api.delete("pods", "forced", gracePeriodSeconds=0)
    return (api.list_changes("pods", since, "probe=forced"),)


@register_probe("201", "201", True)
def a_name_used_again(api: ProbeClient) -> Sequence[object]:
    first = api.create("pods", build_bound_pod("reused"))
    api.delete("pods", "reused", gracePeriodSeconds=0)
    second = api.create("pods", build_bound_pod("reused"))
    api.delete("pods", "reused", gracePeriodSeconds=0)
    return first, second, first.metadata["uid"] != second.metadata["uid"]


@register_probe("422 Invalid spec", "422 Invalid spec", "200", "200")
def what_may_change_of_a_pod(api: ProbeClient) -> Sequence[object]:
    created = api.create("pods", build_pod("rigid"))
    tolerations = [*created.body["spec"]["tolerations"], {"key": "a", "operator": "Exists"}]
    answers = (
        api.patch("pods", "rigid", {"spec": {"nodeName": "nowhere"}}),
        api.patch("pods", "rigid", {"spec": {"hostNetwork": True}}),
        api.patch("pods", "rigid", {"spec": {"tolerations": tolerations}}),
        api.patch("pods", "rigid", {"metadata": {"labels": {"a": "b"}}}),
    )
    api.delete("pods", "rigid")
    return answers


@register_probe("422 Invalid spec.containers", "422 Invalid spec.containers[0].image spec.containers[0].name")
def pods_that_are_none(api: ProbeClient) -> Sequence[object]:
    no_containers = api.create("pods", build_pod("broken", containers=[]))
    return no_containers, api.create("pods", build_pod("broken", containers=[{"name": "No_name"}]))


@register_probe(
    "422 Invalid spec.containers[0].volumeMounts[0].name",
    "422 Invalid spec.restartPolicy",
    "400 BadRequest",
)
def templates_that_do_not_fit(api: ProbeClient) -> Sequence[object]:
    container = {"name": "one", "image": "none", "volumeMounts": [{"name": "missing", "mountPath": "/a"}]}
    return (
        api.create("pods", build_pod("unfit", containers=[container]), dryRun="All"),
        api.create("pods", build_pod("unfit", restartPolicy="Sometimes"), dryRun="All"),
        api.create("pods", build_pod("unfit", containers="none"), dryRun="All"),
    )


@register_probe("400 BadRequest", True, "201", "201", "404 NotFound")
def dry_runs_of_pods(api: ProbeClient) -> Sequence[object]:
    strict = api.create("pods", build_pod("dry", color="red"), dryRun="All", fieldValidation="Strict")
    lax = api.create("pods", build_pod("dry", color="red"), dryRun="All")
    valid = api.create("pods", build_pod("dry"), dryRun="All", fieldValidation="Strict")
    return strict, 'unknown field "spec.color"' in strict.message, lax, valid, api.get("pods", "dry")


@register_probe("409 AlreadyExists")
def a_dry_run_of_what_is_there(api: ProbeClient) -> Sequence[object]:
    api.create("pods", build_pod("there"))
    dry_run = api.create("pods", build_pod("there"), dryRun="All", fieldValidation="Strict")
    api.delete("pods", "there")
    return (dry_run,)


@register_probe(
    "403 Forbidden",
    'serviceaccount "missing" not found',
    "403 Forbidden",
    'pods "denied" is forbidden: no PriorityClass with name urgent was found',
)
def pods_that_name_what_is_not_there(api: ProbeClient) -> Sequence[object]:
    account = api.create("pods", build_pod("denied", serviceAccountName="missing"))
    priority = api.create("pods", build_pod("denied", priorityClassName="urgent"))
    return account, account.message.rpartition(": ")[2], priority, priority.message


# Quota


@register_probe(
    "201",
    "403 Forbidden",
    'pods "quota-2" is forbidden: exceeded quota: few, requested: pods=1, used: pods=1, limited: pods=1',
    "403 Forbidden",
    "201",
)
def a_quota_of_pods(api: ProbeClient) -> Sequence[object]:
    """A pod that is being deleted still counts. A dry run is refused, too, and takes nothing."""
    namespace = _create_namespace_with_quota(api, "quota", "1")
    dry_run = api.create("pods", build_bound_pod("quota-0"), namespace, dryRun="All")
    assert dry_run.status == 201
    first = api.create("pods", build_bound_pod("quota-1"), namespace)
    second = api.create("pods", build_bound_pod("quota-2"), namespace)
    api.delete("pods", "quota-1", namespace, gracePeriodSeconds=60)
    third = api.create("pods", build_bound_pod("quota-2"), namespace)
    api.delete("pods", "quota-1", namespace, gracePeriodSeconds=0)
    last = _create_when_allowed(api, build_bound_pod("quota-2"), namespace)
    api.delete("namespaces", namespace)
    return first, second, second.message, third, last


@register_probe("409 AlreadyExists", "2", "403 Forbidden", "0")
def a_quota_is_charged_for_what_exists(api: ProbeClient) -> Sequence[object]:
    """A client that makes an object twice is charged twice, until the quota's controller counts again."""
    namespace = _create_namespace_with_quota(api, "charge", "2")
    api.create("pods", build_pod("charged"), namespace)
    repeated = api.create("pods", build_pod("charged"), namespace)
    used = api.get("resourcequotas", "few", namespace).body["status"]["used"]["pods"]
    over_quota = api.create("pods", build_pod("charged"), namespace)
    api.delete("pods", "charged", namespace, gracePeriodSeconds=0)

    def freed() -> bool:
        return bool(api.get("resourcequotas", "few", namespace).body["status"]["used"]["pods"] == "0")

    api.wait_until(freed)
    remaining = api.get("resourcequotas", "few", namespace).body["status"]["used"]["pods"]
    api.delete("namespaces", namespace)
    return repeated, used, over_quota, remaining


@register_probe("201", "201")
def ended_pods_do_not_count(api: ProbeClient) -> Sequence[object]:
    namespace = _create_namespace_with_quota(api, "ended", "1")
    first = api.create("pods", build_bound_pod("ended-1"), namespace)
    path = api.build_path("pods", "ended-1", "status", namespace)
    api.server.request("PATCH", path, {}, {"status": {"phase": "Succeeded"}}, MERGE_PATCH_TYPE)
    last = _create_when_allowed(api, build_bound_pod("ended-2"), namespace)
    for name in ("ended-1", "ended-2"):
        api.delete("pods", name, namespace, gracePeriodSeconds=0)
    api.delete("namespaces", namespace)
    return first, last


def _create_when_allowed(api: ProbeClient, body: Object, namespace: str) -> ProbeAnswer:
    """The answer once the quota allows it."""
    answers = [api.create("pods", body, namespace)]

    def made() -> bool:
        if answers[-1].status == 403:
            answers.append(api.create("pods", body, namespace))
        return answers[-1].status == 201

    api.wait_until(made)
    return answers[-1]


def _create_namespace_with_quota(api: ProbeClient, name: str, pods: str) -> str:
    """A namespace of its own, where this many pods may be."""
    namespace = f"{api.server.namespace}-{name}"
    api.create("namespaces", {"metadata": {"name": namespace}})
    api.create("resourcequotas", {"metadata": {"name": "few"}, "spec": {"hard": {"pods": pods}}}, namespace)

    def ready() -> bool:
        hard_limits = api.get("resourcequotas", "few", namespace).body.get("status", {}).get("hard")
        return bool(hard_limits) and api.create("pods", build_pod("try"), namespace, dryRun="All").status == 201

    assert api.wait_until(ready)
    return namespace


# Owners


@register_probe(True, True, ["stays"], "200")
def dependants_go_with_their_owner(api: ProbeClient) -> Sequence[object]:
    """Later, and only once they have no owner left; the ones that are gone are forgotten."""
    first, second = (api.create("configmaps", build_config_map(f"owner-{i}")) for i in (1, 2))
    owners = [build_owner_reference("ConfigMap", first), build_owner_reference("ConfigMap", second)]
    api.create("configmaps", build_config_map("alone", ownerReferences=owners[:1]))
    api.create("configmaps", build_config_map("stays", ownerReferences=owners))
    api.delete("configmaps", "owner-1")
    was_deleted = api.wait_until_gone("configmaps", "alone")

    def forgotten() -> bool:
        return len(api.get("configmaps", "stays").metadata["ownerReferences"]) == 1

    was_forgotten = api.wait_until(forgotten)
    dependent = api.get("configmaps", "stays")
    return was_deleted, was_forgotten, [dependent.metadata["name"]], dependent


@register_probe("201", True, True)
def a_dependent_without_an_owner_is_deleted(api: ProbeClient) -> Sequence[object]:
    """Its owner has never been there, or is another one of that name by now."""
    owner = api.create("configmaps", build_config_map("namesakes-owner"))
    reference = {**build_owner_reference("ConfigMap", owner), "uid": "00000000-0000-4000-8000-000000000000"}
    created = api.create(
        "configmaps", build_config_map("orphaned", ownerReferences=[{**reference, "name": "never-there"}])
    )
    api.create("configmaps", build_config_map("anothers", ownerReferences=[reference]))
    return created, api.wait_until_gone("configmaps", "orphaned"), api.wait_until_gone("configmaps", "anothers")


@register_probe(True, "200")
def a_dependant_with_a_finalizer_stays_for_it(api: ProbeClient) -> Sequence[object]:
    owner = api.create("configmaps", build_config_map("bolts-owner"))
    dependent = build_config_map(
        "bolts", finalizers=["pacekeeper.dev/probe"], ownerReferences=[build_owner_reference("ConfigMap", owner)]
    )
    api.create("configmaps", dependent)
    api.delete("configmaps", "bolts-owner")
    marked = api.wait_until(lambda: "deletionTimestamp" in api.get("configmaps", "bolts").metadata)
    return marked, api.patch("configmaps", "bolts", {"metadata": {"finalizers": None}})


@register_probe("200", ["foregroundDeletion"], True, True)
def deletion_in_the_foreground(api: ProbeClient) -> Sequence[object]:
    owner = api.create("configmaps", build_config_map("front"))
    blocking = build_owner_reference("ConfigMap", owner, blockOwnerDeletion=True)
    api.create("configmaps", build_config_map("behind", ownerReferences=[blocking]))
    deleted = api.delete("configmaps", "front", propagationPolicy="Foreground")
    both_gone = api.wait_until_gone("configmaps", "behind"), api.wait_until_gone("configmaps", "front")
    return deleted, deleted.metadata["finalizers"], *both_gone


@register_probe(["orphan"], True, None)
def deletion_that_leaves_orphans(api: ProbeClient) -> Sequence[object]:
    owner = api.create("configmaps", build_config_map("parent"))
    api.create("configmaps", build_config_map("child", ownerReferences=[build_owner_reference("ConfigMap", owner)]))
    deleted = api.delete("configmaps", "parent", propagationPolicy="Orphan")
    is_gone = api.wait_until_gone("configmaps", "parent")
    return deleted.metadata["finalizers"], is_gone, api.get("configmaps", "child").metadata.get("ownerReferences")


# Server-side apply


@register_probe("200", ["applier Apply", "probe Update"], ["applier Apply"], "200", {"a": "1"}, ["probe Update"])
def applying_and_giving_up(api: ProbeClient) -> Sequence[object]:
    """A value that others own, too, stays; one's own goes."""
    api.create("configmaps", build_config_map("applied", {"a": "1"}))
    applied = api.apply("configmaps", "applied", {"data": {"a": "1", "b": "2"}}, "applier")
    owners = _list_data_owners(applied, "a"), _list_data_owners(applied, "b")
    given_up = api.apply("configmaps", "applied", {}, "applier")
    return applied, *owners, given_up, given_up.body["data"], _list_data_owners(given_up, "a")


@register_probe("409 Conflict data.a", "200", ["two Apply"], {"a": "2"})
def applying_what_others_own(api: ProbeClient) -> Sequence[object]:
    api.apply("configmaps", "contested", {"data": {"a": "1"}}, "one")
    refused = api.apply("configmaps", "contested", {"data": {"a": "2"}}, "two", force=False)
    forced = api.apply("configmaps", "contested", {"data": {"a": "2"}}, "two")
    return refused, forced, _list_data_owners(forced, "a"), forced.body["data"]


@register_probe("201", "200", None, True)
def applying_what_is_not_there(api: ProbeClient) -> Sequence[object]:
    created = api.apply("configmaps", "fresh", {"data": {"a": "1"}}, "one")
    given_up = api.apply("configmaps", "fresh", {}, "one")
    repeated = api.apply("configmaps", "fresh", {}, "one")
    return created, given_up, given_up.body.get("data"), repeated.version == given_up.version


@register_probe("409 Conflict", "422 Invalid metadata.uid", "409 Conflict", "200")
def applying_to_a_certain_object(api: ProbeClient) -> Sequence[object]:
    created = api.create("configmaps", build_config_map("precise"))
    uid = created.metadata["uid"]
    return (
        api.apply("configmaps", "nowhere-to-be-found", {"metadata": {"uid": uid}, "data": {"a": "1"}}, "one"),
        api.apply("configmaps", "precise", {"metadata": {"uid": "another"}, "data": {"a": "1"}}, "one"),
        api.apply("configmaps", "precise", {"metadata": {"resourceVersion": "1"}, "data": {"a": "1"}}, "one"),
        api.apply("configmaps", "precise", {"metadata": {"uid": uid}, "data": {"a": "1"}}, "one"),
    )


@register_probe("404 NotFound", "200", {"flows": 3, "lowerBound": 2}, 4, {"flows": 5}, True)
def applying_a_status(api: ProbeClient) -> Sequence[object]:
    """Nothing else of the body counts, nor is anything made; fields that are named no longer go."""
    missing = api.apply("fabrics", "probe-nowhere", {"status": {"flows": 3}}, "one", "status")
    created = api.create("fabrics", {"metadata": {"name": "probe-fabric"}, "spec": {"spines": 4}})
    body = {
        "metadata": {"uid": created.metadata["uid"]},
        "spec": {"spines": 9},
        "status": {"flows": 3, "lowerBound": 2},
    }
    first = api.apply("fabrics", "probe-fabric", body, "one", "status")
    second = api.apply("fabrics", "probe-fabric", {"status": {"flows": 5}}, "one", "status")
    repeated = api.apply("fabrics", "probe-fabric", {"status": {"flows": 5}}, "one", "status")
    api.delete("fabrics", "probe-fabric")
    status = second.body["status"]
    return (
        missing,
        first,
        first.body["status"],
        first.body["spec"]["spines"],
        status,
        repeated.version == second.version,
    )


@register_probe(["probe Update"], ["one Apply"])
def an_update_takes_what_it_changes(api: ProbeClient) -> Sequence[object]:
    api.apply("configmaps", "taken", {"data": {"a": "1", "b": "1"}}, "one")
    patched = api.patch("configmaps", "taken", {"data": {"a": "2", "b": "1"}})
    return _list_data_owners(patched, "a"), _list_data_owners(patched, "b")


@register_probe("422 Invalid fieldManager", "422 Invalid force")
def applying_without_a_name(api: ProbeClient) -> Sequence[object]:
    path = api.build_path("configmaps", "unnamed")
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "unnamed"}}
    unnamed = ProbeAnswer(*api.server.request("PATCH", path, {"force": "true"}, body, APPLY_PATCH_TYPE))
    merging = ProbeAnswer(
        *api.server.request("PATCH", path, {"fieldManager": "one", "force": "true"}, body, MERGE_PATCH_TYPE)
    )
    return unnamed, merging


def _list_data_owners(answer: ProbeAnswer, key: str) -> list[str]:
    return sorted(
        f"{entry['manager']} {entry['operation']}"
        for entry in answer.metadata.get("managedFields", ())
        if f"f:{key}" in entry["fieldsV1"].get("f:data", {})
    )


# Nodes


@register_probe(["cordon Apply"], None, [])
def a_cordon_of_ones_own(api: ProbeClient) -> Sequence[object]:
    _create_node(api, "probe-own")
    applied = api.apply("nodes", "probe-own", {"spec": {"unschedulable": True}}, "cordon")
    given_up = api.apply("nodes", "probe-own", {}, "cordon")
    api.delete("nodes", "probe-own")
    field = "spec.unschedulable"
    return list_managers(applied, field), given_up.body["spec"].get("unschedulable"), list_managers(given_up, field)


@register_probe(["cordon Apply", "person Update"], True, ["person Update"])
def a_cordon_of_somebody_elses(api: ProbeClient) -> Sequence[object]:
    _create_node(api, "probe-others")
    api.patch("nodes", "probe-others", {"spec": {"unschedulable": True}}, manager="person")
    applied = api.apply("nodes", "probe-others", {"spec": {"unschedulable": True}}, "cordon")
    given_up = api.apply("nodes", "probe-others", {}, "cordon")
    api.delete("nodes", "probe-others")
    field = "spec.unschedulable"
    return list_managers(applied, field), given_up.body["spec"].get("unschedulable"), list_managers(given_up, field)


@register_probe(["cordon Apply"], None, [], ["person Update"])
def a_cordon_that_others_take_away(api: ProbeClient) -> Sequence[object]:
    """Who cordons what is cordoned already owns nothing of it."""
    _create_node(api, "probe-taken")
    api.apply("nodes", "probe-taken", {"spec": {"unschedulable": True}}, "cordon")
    cordoned = api.patch("nodes", "probe-taken", {"spec": {"unschedulable": True}}, manager="person")
    uncordoned = api.patch("nodes", "probe-taken", {"spec": {"unschedulable": False}}, manager="person")
    repeated = api.patch("nodes", "probe-taken", {"spec": {"unschedulable": True}}, manager="person")
    api.delete("nodes", "probe-taken")
    field = "spec.unschedulable"
    return (
        list_managers(cordoned, field),
        uncordoned.body["spec"].get("unschedulable"),
        list_managers(uncordoned, field),
        list_managers(repeated, field),
    )


@register_probe("200", ["mine", "theirs"], "409 Conflict", "200", ["theirs"])
def taints_at_a_certain_version(api: ProbeClient) -> Sequence[object]:
    _create_node(api, "probe-taints", taints=[{"key": "theirs", "effect": "NoSchedule"}])

    def written(add: bool) -> tuple[ProbeAnswer, ProbeAnswer]:
        while True:  # the real node's controllers write, too
            current = api.get("nodes", "probe-taints")
            taints = [taint for taint in current.body["spec"]["taints"] if taint["key"] != "mine"]
            taints += [{"key": "mine", "effect": "NoSchedule"}] if add else []
            body = {"metadata": {"resourceVersion": current.version}, "spec": {"taints": taints}}
            answer = api.patch("nodes", "probe-taints", body)
            if answer.status != 409:
                return answer, current

    tainted, previous = written(add=True)
    stale = {"metadata": {"resourceVersion": previous.version}, "spec": {"taints": None}}
    refused = api.patch("nodes", "probe-taints", stale)
    untainted, _ = written(add=False)
    api.delete("nodes", "probe-taints")
    return tainted, _list_taints(tainted), refused, untainted, _list_taints(untainted)


@register_probe("422 Invalid metadata.taints[0].effect", "200", None)
def writing_to_nodes(api: ProbeClient) -> Sequence[object]:
    _create_node(api, "probe-written")
    invalid_effect = api.patch("nodes", "probe-written", {"spec": {"taints": [{"key": "a", "effect": "Sometimes"}]}})
    status = {"spec": {"unschedulable": True}, "status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    by_status = api.patch("nodes", "probe-written", status, "status")
    api.delete("nodes", "probe-written")
    return invalid_effect, by_status, by_status.body["spec"].get("unschedulable")


@register_probe(["before-first-apply Update", "cordon Apply"], True, ["before-first-apply Update"])
def a_cordon_of_a_node_without_managed_fields(api: ProbeClient) -> Sequence[object]:
    """Who changed what is not written down before the first apply; the cordon that is there then stays."""
    _create_node(api, "probe-unowned")
    api.patch("nodes", "probe-unowned", {"metadata": {"managedFields": [{}]}, "spec": {"unschedulable": True}})
    applied = api.apply("nodes", "probe-unowned", {"spec": {"unschedulable": True}}, "cordon")
    given_up = api.apply("nodes", "probe-unowned", {}, "cordon")
    api.delete("nodes", "probe-unowned")
    field = "spec.unschedulable"
    return list_managers(applied, field), given_up.body["spec"].get("unschedulable"), list_managers(given_up, field)


def _create_node(api: ProbeClient, name: str, **spec: Any) -> None:
    api.delete("nodes", name)
    created = api.create("nodes", {"metadata": {"name": name, "labels": {"probe": name}}, "spec": spec})
    assert created.status == 201


def _list_taints(answer: ProbeAnswer) -> list[str]:
    keys = [taint["key"] for taint in answer.body["spec"].get("taints", ())]
    return sorted(key for key in keys if key in ("mine", "theirs"))


# Custom resources


@register_probe(
    "422 Invalid spec.replicas",
    "422 Invalid spec.replicas",
    "422 Invalid spec.syncMode",
    "422 Invalid spec.template",
    "422 Invalid spec.suspend",
    "422 Invalid spec.remediation.allow[1]",
)
def jobs_that_are_none(api: ProbeClient) -> Sequence[object]:
    bodies = [
        build_job("bad", replicas=0),
        build_job("bad", replicas="two"),
        build_job("bad", syncMode="Never"),
        {"metadata": {"name": "bad"}, "spec": {}},
        build_job("bad", suspend=1),
        build_job("bad", remediation={"allow": ["Rebalance", "Rebalance"]}),
    ]
    return [api.create("trainingjobs", body, dryRun="All") for body in bodies]


@register_probe(
    "422 Invalid <nil>",
    "422 Invalid spec.minReplicas",
    "422 Invalid spec.schedulingTimeout",
    "422 Invalid spec.schedulingTimeout",
    "422 Invalid spec.checkpoint.path",
    "422 Invalid spec.checkpoint.uri",
    "422 Invalid spec.checkpoint.uri",
    "422 Invalid spec.checkpoint.uri",
    "422 Invalid spec.checkpoint.uri",
    "422 Invalid spec.checkpoint.uri",
    "422 Invalid spec.checkpoint.uri",
    "422 Invalid spec.checkpoint.uri",
    "422 Invalid spec.checkpoint.accessMode",
    "422 Invalid spec.checkpoint.accessMode",
    "422 Invalid spec.detection.hangSeconds",
    "422 Invalid spec.trainerContainer",
    "422 Invalid spec.trainerContainer",
    "422 Invalid spec.template.spec.restartPolicy",
    "422 Invalid spec.template.metadata.labels",
    "422 Invalid spec.nprocPerNode",
    "201",
)
def rules_of_jobs(api: ProbeClient) -> Sequence[object]:
    two_containers = {"spec": {"containers": [{"name": "one"}, {"name": "other"}]}}
    container = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": 2}}}
    labeled = {"metadata": {"labels": {"pacekeeper.dev/a": "b"}}, "spec": {"containers": [{"name": "trainer"}]}}
    mount = {"name": "data", "mountPath": "/checkpoints"}
    mounted = {"spec": {"containers": [{"name": "trainer", "volumeMounts": [mount]}]}}
    bodies = [
        build_job("9lives"),
        build_job("ruled", replicas=2, minReplicas=3),
        build_job("ruled", schedulingTimeout="soon"),
        build_job("ruled", schedulingTimeout="1s"),
        build_job("ruled", checkpoint={"path": "relative"}),
        build_job("ruled", checkpoint={"uri": "s3://bucket/"}),
        build_job("ruled", checkpoint={"uri": "memory://bucket"}),
        build_job("ruled", checkpoint={"uri": "s3://key:secret@bucket"}),
        build_job("ruled", checkpoint={"uri": "s3://bucket", "volumeClaimName": "claim"}),
        build_job("ruled", checkpoint={"uri": "s3://bucket", "path": "/elsewhere"}),
        build_job("ruled", checkpoint={"uri": "s3://bucket"}, template=mounted),
        build_job("ruled", checkpoint={"uri": "claim://checkpoints/job"}),
        build_job("ruled", checkpoint={"accessMode": "ReadWriteOnce"}),
        build_job(
            "ruled", checkpoint={"accessMode": "ReadWriteOnce", "volumeClaimName": "claim", "path": "/elsewhere"}
        ),
        build_job("ruled", detection={"hangSeconds": "never"}),
        build_job("ruled", template=two_containers),
        build_job("ruled", template=two_containers, trainerContainer="third"),
        build_job("ruled", template={"spec": {"restartPolicy": "Always", "containers": [{"name": "trainer"}]}}),
        build_job("ruled", template=labeled),
        build_job("ruled", nprocPerNode=4, template={"spec": {"containers": [container]}}),
        build_job("ruled", detection={"hangSeconds": 90}, checkpoint={"uri": "s3://bucket/folder"}),
    ]
    return [api.create("trainingjobs", body, dryRun="All") for body in bodies]


@register_probe("400 BadRequest", True, "201", None, 1, "5m", "Act", 3)
def unknown_fields_and_defaults(api: ProbeClient) -> Sequence[object]:
    strict = api.create("trainingjobs", build_job("filled", color="red"), dryRun="All", fieldValidation="Strict")
    lax = api.create("trainingjobs", build_job("filled", color="red"), dryRun="All")
    spec = lax.body["spec"]
    return (
        strict,
        'unknown field "spec.color"' in strict.message,
        lax,
        spec.get("color"),
        spec["replicas"],
        spec["schedulingTimeout"],
        spec["remediation"]["mode"],
        spec["checkpoint"]["keep"],
    )


@register_probe(
    "200", 2, "422 Invalid spec.template", "200", "422 Invalid spec.nprocPerNode", "200", "422 Invalid spec.replicas"
)
def what_may_change_of_a_job(api: ProbeClient) -> Sequence[object]:
    """A template only while it is suspended, by its phase."""
    api.create("trainingjobs", build_job("changing"))
    resumed = api.patch("trainingjobs", "changing", {"spec": {"suspend": False}})
    generation = resumed.metadata["generation"]
    template = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 5}}}}
    live = api.patch("trainingjobs", "changing", template)
    api.patch("trainingjobs", "changing", {"spec": {"suspend": True}})
    suspended = api.patch("trainingjobs", "changing", template)
    api.patch("trainingjobs", "changing", {"status": {"phase": "Running"}}, "status")
    running = api.patch("trainingjobs", "changing", {"spec": {"nprocPerNode": 2}})
    scaled = api.patch("trainingjobs", "changing", {"spec": {"replicas": 3}}, "scale")
    no_replicas = api.patch("trainingjobs", "changing", {"spec": {"replicas": 0}})
    api.delete("trainingjobs", "changing")
    return resumed, generation, live, suspended, running, scaled, no_replicas


@register_probe(
    "422 Invalid status.phase",
    "422 Invalid status.step",
    "422 Invalid status.startTime",
    "422 Invalid status.conditions[0].reason",
    "422 Invalid status.conditions[1]",
    "200",
    {"observedGeneration": -1, "phase": "Running", "step": 5},
)
def status_that_does_not_fit(api: ProbeClient) -> Sequence[object]:
    api.create("trainingjobs", build_job("spoken"))
    condition = {"type": "A", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    complete = {**condition, "reason": "B"}
    statuses: list[Object] = [
        {"phase": "Sleeping"},
        {"step": 1.5},
        {"startTime": "yesterday"},
        {"conditions": [condition]},
        {"conditions": [complete, complete]},
        {"phase": "Running", "step": 5, "color": "red"},
    ]
    answers = [api.patch("trainingjobs", "spoken", {"status": status}, "status") for status in statuses]
    api.delete("trainingjobs", "spoken")
    return *answers, answers[-1].body["status"]


@register_probe("422 Invalid spec", "422 Invalid spec.cause", "422 Invalid spec.class", "200")
def an_incident_is_written_once(api: ProbeClient) -> Sequence[object]:
    api.create("incidents", build_incident("once"))
    incident = build_incident("wrong")
    return (
        api.patch("incidents", "once", {"spec": {"message": "another"}}),
        api.create("incidents", {**incident, "spec": {**incident["spec"], "cause": "Crash!"}}),
        api.create("incidents", {**incident, "spec": {**incident["spec"], "class": "Bad"}}),
        api.patch("incidents", "once", {"metadata": {"annotations": {"a": "b"}}}),
    )


@register_probe(
    "422 Invalid spec.spines",
    "422 Invalid spec.spines",
    "422 Invalid spec.pathControl",
    "422 Invalid spec.pathControl.ports",
    "422 Invalid spec.pathControl.ports",
    "422 Invalid spec.uplink.capacity",
    "422 Invalid spec.levels[0].nodeLabel",
    "422 Invalid spec.exceptions[0]",
    "422 Invalid spec.exceptions[0]",
    "422 Invalid spec.exceptions[1]",
    "422 Invalid spec.linkQuery",
    "201",
)
def rules_of_fabrics(api: ProbeClient) -> Sequence[object]:
    def made(name: str = "probe-bad", **spec: Any) -> ProbeAnswer:
        return api.create("fabrics", {"metadata": {"name": name}, "spec": {"spines": 4, **spec}})

    link = {"leaf": "l1", "spine": "s1"}
    valid_spec: dict[str, Any] = {
        "levels": [{"nodeLabel": "fabric.topograph.run/tier-0"}],
        "planes": 2,
        "uplink": {"capacity": "1.6T", "parallel": 2},
        "exceptions": [link, {"leaf": "l2", "spine": "s1", "state": "Slow", "capacity": "100G"}],
        "hops": {"10.98.1.3": "s1"},
        "linkQuery": "min by (leaf, spine) (link_bits)",
        "pathControl": {"mode": "Probe", "ports": "20000-29999"},
    }
    answers = (
        made(spines=0),
        api.create("fabrics", {"metadata": {"name": "probe-bad"}, "spec": {}}),
        made(pathControl={"mode": "Probe"}),
        made(pathControl={"ports": "29999-20000"}),
        made(pathControl={"ports": "20000-70000"}),
        made(uplink={"capacity": "400"}),
        made(levels=[{"nodeLabel": "no label"}]),
        made(exceptions=[{**link, "state": "Slow"}]),
        made(exceptions=[{**link, "capacity": "100G"}]),
        made(exceptions=[link, link]),
        made(linkQuery="  "),
        made("probe-good", **valid_spec),
    )
    api.delete("fabrics", "probe-good")
    return answers


@register_probe(
    "422 Invalid spec.reason",
    "422 Invalid spec.expiresAfter",
    "201",
    "200",
    "422 Invalid spec.approved",
    "422 Invalid spec.nodeUID",
    "422 Invalid spec.incidentRef",
    "200",
    "1h",
)
def rules_of_quarantines(api: ProbeClient) -> Sequence[object]:
    created = api.create("nodequarantines", build_quarantine("probe-rules", nodeUID="a"))
    answers = (
        api.create("nodequarantines", build_quarantine("probe-bad", reason="  ")),
        api.create("nodequarantines", build_quarantine("probe-bad", expiresAfter="0s")),
        created,
        api.patch("nodequarantines", "probe-rules", {"spec": {"approved": True}}),
        api.patch("nodequarantines", "probe-rules", {"spec": {"approved": False}}),
        api.patch("nodequarantines", "probe-rules", {"spec": {"nodeUID": "b"}}),
        api.patch("nodequarantines", "probe-rules", {"spec": {"incidentRef": {"namespace": "a", "name": "b"}}}),
        api.patch("nodequarantines", "probe-rules", {"spec": {"reason": "another"}}),
    )
    api.delete("nodequarantines", "probe-rules")
    return *answers, created.body["spec"]["expiresAfter"]


@register_probe(
    "201", {"a": None, "b": [None, {"c": None}]}, "200", {"b": 1}, "422 Invalid state", "422 Invalid schemaVersion"
)
def what_a_state_keeps(api: ProbeClient) -> Sequence[object]:
    """Of plan and state everything, also what is null; a merge patch takes that out."""
    plan = {"a": None, "b": [None, {"c": None}]}
    created = api.create("trainingjobstates", {**build_state("keeping"), "plan": plan})
    patched = api.patch("trainingjobstates", "keeping", {"plan": {"a": None, "b": 1}})
    return (
        created,
        created.body["plan"],
        patched,
        patched.body["plan"],
        api.patch("trainingjobstates", "keeping", {"state": None}),
        api.patch("trainingjobstates", "keeping", {"schemaVersion": 0}),
    )


# Leases, tokens, network policies


@register_probe("200", {"leaseDurationSeconds": 15}, "409 Conflict")
def a_lease_that_is_given_back(api: ProbeClient) -> Sequence[object]:
    spec = {"holderIdentity": "a", "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z"}
    created = api.create("leases", {"metadata": {"name": "given-back"}, "spec": spec})
    released = {"holderIdentity": None, "leaseDurationSeconds": 15, "renewTime": None}
    replaced = api.replace("leases", "given-back", {**created.body, "spec": released})
    return replaced, replaced.body["spec"], api.replace("leases", "given-back", created.body)


@register_probe("201", None, "invalid bearer token")
def a_token_without_an_account(api: ProbeClient) -> Sequence[object]:
    body = {"metadata": {}, "spec": {"token": "a.b.c", "audiences": ["pacekeeper"]}}
    review = api.create("tokenreviews", body)
    return review, review.body["status"].get("authenticated"), review.body["status"]["error"]


@register_probe(True, ["pacekeeper"], ["tokened"], True, None, True)
def a_token_of_a_pod(api: ProbeClient) -> Sequence[object]:
    """The server remembers for a while that it was good: also when the pod is gone."""
    pod = api.create("pods", build_pod("tokened"))
    token = api.server.create_token(pod.body, "pacekeeper")
    status = _review_token(api, token, "pacekeeper")
    extra = status["user"]["extra"]
    uids, other_audience = extra["authentication.kubernetes.io/pod-uid"], _review_token(api, token, "another")
    api.delete("pods", "tokened")
    return (
        status["authenticated"],
        status["audiences"],
        extra["authentication.kubernetes.io/pod-name"],
        uids == [pod.metadata["uid"]],
        other_audience.get("authenticated"),
        _review_token(api, token, "pacekeeper")["authenticated"],
    )


@register_probe(None, "service account token has been invalidated]")
def a_token_of_a_pod_that_is_gone(api: ProbeClient) -> Sequence[object]:
    pod = api.create("pods", build_pod("untokened"))
    token = api.server.create_token(pod.body, "pacekeeper")
    api.delete("pods", "untokened")
    status: Object = {}

    def refused() -> bool:
        status.clear()  # the token may have been good a moment ago
        status.update(_review_token(api, token, "pacekeeper"))
        return "authenticated" not in status

    api.wait_until(refused)
    return status.get("authenticated"), status.get("error", "").rpartition(", ")[2]


def _review_token(api: ProbeClient, token: str, audience: str) -> Object:
    review = api.create("tokenreviews", {"metadata": {}, "spec": {"token": token, "audiences": [audience]}})
    status: Object = review.body["status"]
    return status


@register_probe("201", 1, "200", 2, "409 Conflict")
def network_policies(api: ProbeClient) -> Sequence[object]:
    spec: Object = {"podSelector": {"matchLabels": {"a": "b"}}, "policyTypes": ["Ingress"]}
    created = api.create("networkpolicies", {"metadata": {"name": "closed"}, "spec": spec})
    new_body = {**created.body, "spec": {**spec, "podSelector": {}}}
    changed = api.replace("networkpolicies", "closed", new_body)
    stale = api.replace("networkpolicies", "closed", created.body)
    return created, created.metadata["generation"], changed, changed.metadata["generation"], stale


# Watches


@register_probe(["ADDED w-1", "MODIFIED w-1", "ADDED w-2", "DELETED w-1"])
def a_watch_tells_in_order(api: ProbeClient) -> Sequence[object]:
    since = api.list_objects("configmaps").version
    api.create("configmaps", build_config_map("w-1", labels={"probe": "watched"}))
    api.patch("configmaps", "w-1", {"data": {"a": "1"}})
    api.create("configmaps", build_config_map("w-2", labels={"probe": "watched"}))
    api.create("configmaps", build_config_map("w-3"))
    api.delete("configmaps", "w-1")
    return (api.list_changes("configmaps", since, "probe=watched"),)


@register_probe(["ADDED in-and-out", "DELETED in-and-out"])
def what_leaves_a_selection_is_deleted(api: ProbeClient) -> Sequence[object]:
    created = api.create("configmaps", build_config_map("in-and-out"))
    api.patch("configmaps", "in-and-out", {"metadata": {"labels": {"probe": "in"}}})
    api.patch("configmaps", "in-and-out", {"metadata": {"labels": {"probe": "out"}}})
    return (api.list_changes("configmaps", created.version, "probe=in"),)


@register_probe(["ERROR 410"])
def a_watch_from_long_ago(api: ProbeClient) -> Sequence[object]:
    return (api.list_changes("configmaps", "1"),)


def _parse_second(text: str) -> int:
    hours, minutes, seconds = text[11:19].split(":")
    return int(text[8:10]) * 86400 + int(hours) * 3600 + int(minutes) * 60 + int(seconds)
