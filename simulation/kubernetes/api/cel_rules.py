"""Python equivalents of the CEL rules in crds/, by the rules' texts.

The key is the rule's text with single spaces. `old` is CEL's oldSelf. A schema with a rule that has no entry here
cannot be loaded. So a change of a rule requires a change of its equivalent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

CelFunction = Callable[[Any, Any], bool]

_DURATION_PATTERN = re.compile(r"([0-9]{1,6}h)?([0-9]{1,6}m)?([0-9]{1,6}s)?")
_NAME_PATTERN = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_QUALIFIED_NAME_PATTERN = re.compile("([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_GPU_CEL_MEMBER = "nvidia__dot__com__slash__gpu"


def _is_duration(value: Any) -> bool:
    return isinstance(value, str) and value != "" and _DURATION_PATTERN.fullmatch(value) is not None


def _build_duration_check(least: float, most: float) -> CelFunction:
    """Build a check of a duration's bounds in seconds. Malformed durations are left to another rule."""

    def holds(value: Any, _: Any) -> bool:
        match = _DURATION_PATTERN.fullmatch(value) if _is_duration(value) else None
        if match is None:
            return True
        hours, minutes, seconds = (int(part[:-1]) if part else 0 for part in match.groups())
        return least <= hours * 3600 + minutes * 60 + seconds <= most

    return holds


def _build_duration_rule(least: str, most: str) -> str:
    return (
        "!(type(self) == string && self.matches('^([0-9]{1,6}h)?([0-9]{1,6}m)?([0-9]{1,6}s)?$') && self != '') "
        f"|| (duration(self) >= duration('{least}') && duration(self) <= duration('{most}'))"
    )


def _is_port_range(text: str) -> bool:
    if re.fullmatch("[1-9][0-9]{3,4}-[1-9][0-9]{3,4}", text) is None:
        return False
    first, last = map(int, text.split("-"))
    return 1024 <= first < last <= 65535


def _was_suspended(old: Any) -> bool:
    return bool(old["spec"]["suspend"]) and old.get("status", {}).get("phase", "Suspended") == "Suspended"


def _is_same_storage(job: Any, old: Any) -> bool:
    current, previous = job["spec"]["checkpoint"], old["spec"]["checkpoint"]
    fields = ("path", "everySteps", "volumeClaimName", "accessMode", "uri", "subPath", "adopt", "readOnly")
    return all(current.get(field) == previous.get(field) for field in fields)


def _is_inside(path: str) -> bool:
    return path == "" or all(part not in ("", ".", "..") for part in path.split("/"))


def _names_trainer(spec: Any, _: Any) -> bool:
    containers = spec["template"]["spec"]["containers"]
    if "trainerContainer" in spec:
        return any(c["name"] == spec["trainerContainer"] for c in containers)
    with_gpus = [c for c in containers if _get_gpu_limit(c) is not None]
    return len(containers) == 1 or any(c["name"] == "trainer" for c in containers) or len(with_gpus) == 1


def _get_gpu_limit(container: Any) -> Any:
    return container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu")


def _has_enough_gpus(spec: Any, _: Any) -> bool:
    containers = spec["template"]["spec"]["containers"]
    names = [c["name"] for c in containers]
    trainer = spec.get("trainerContainer", "trainer" if "trainer" in names else None)
    limits = [_get_gpu_limit(c) for c in containers if trainer in (None, c["name"])]
    return all(limit is None or spec["nprocPerNode"] <= int(limit) for limit in limits)


def _build_mount_check(field: str) -> CelFunction:
    """Build a check that the template mounts nothing where the checkpoints of `field` would be."""

    def is_free(spec: Any, _: Any) -> bool:
        containers = spec["template"]["spec"]["containers"]
        trainer = spec.get("trainerContainer", "trainer" if len(containers) > 1 else None)
        trainers = [c for c in containers if trainer in (None, c["name"])]
        mounts = [mount["mountPath"] for c in trainers for mount in c.get("volumeMounts", ())]
        return field not in spec["checkpoint"] or spec["checkpoint"]["path"] not in mounts

    return is_free


def _build_unchanged_check(name: str) -> CelFunction:
    return lambda spec, old: bool(spec.get(name) == old.get(name))


_SUSPENDED_EXPRESSION = (
    "(oldSelf.spec.suspend && "
    "(!has(oldSelf.status) || !has(oldSelf.status.phase) || oldSelf.status.phase == 'Suspended'))"
)

OVERRIDABLE_VARIABLES = {
    *(f"PACEKEEPER_{name}_SECONDS" for name in ("KILL", "GATHER", "IMPORT", "CONTACT", "PHASE", "LINGER")),
    "PACEKEEPER_PEER_REPLICA_MEGABYTES",
    "PACEKEEPER_PEER_SAVES",
    "PACEKEEPER_LAUNCH_SCRIPT",
}
CEL_RULES: Mapping[str, CelFunction] = {
    # Incident
    "self == oldSelf": lambda value, old: bool(value == old),
    "self.matches('^[a-z][a-z-]*[a-z]$')": lambda value, _: re.fullmatch("[a-z][a-z-]*[a-z]", value) is not None,
    # NodeHistory
    "self.nodeUID == oldSelf.nodeUID": _build_unchanged_check("nodeUID"),
    # NodeQuarantine
    "self.approved || !oldSelf.approved": lambda spec, old: bool(spec["approved"] or not old["approved"]),
    "has(self.nodeUID) == has(oldSelf.nodeUID) && (!has(self.nodeUID) || self.nodeUID == oldSelf.nodeUID)": (
        _build_unchanged_check("nodeUID")
    ),
    "has(self.incidentRef) == has(oldSelf.incidentRef) && (!has(self.incidentRef) || "
    "self.incidentRef == oldSelf.incidentRef)": _build_unchanged_check("incidentRef"),
    "self.trim() != ''": lambda value, _: bool(value.strip()),
    # Durations
    "type(self) == string && self.matches('^([0-9]{1,6}h)?([0-9]{1,6}m)?([0-9]{1,6}s)?$') && self != ''": (
        lambda value, _: _is_duration(value)
    ),
    _build_duration_rule("1s", "8760h"): _build_duration_check(1, 8760 * 3600),
    _build_duration_rule("10s", "168h"): _build_duration_check(10, 168 * 3600),
    _build_duration_rule("1m", "720h"): _build_duration_check(60, 720 * 3600),
    _build_duration_rule("10s", "1h"): _build_duration_check(10, 3600),
    _build_duration_rule("1m", "8760h"): _build_duration_check(60, 8760 * 3600),
    # Fabric
    "!has(self.pathControl) || self.pathControl.mode != 'Probe' || has(self.hops) && size(self.hops) > 0": (
        lambda spec, _: spec.get("pathControl", {}).get("mode") != "Probe" or bool(spec.get("hops"))
    ),
    "self.matches('^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')": (
        lambda name, _: _QUALIFIED_NAME_PATTERN.fullmatch(name) is not None
    ),
    "self.matches('^[1-9][0-9]{0,5}([.][0-9]{1,3})?[MGT]$')": (
        lambda rate, _: re.fullmatch(r"[1-9][0-9]{0,5}([.][0-9]{1,3})?[MGT]", rate) is not None
    ),
    "(self.state == 'Slow') == has(self.capacity)": lambda link, _: (link["state"] == "Slow") == ("capacity" in link),
    "self.matches('^[1-9][0-9]{3,4}-[1-9][0-9]{3,4}$') && int(self.split('-')[0]) >= 1024 "
    "&& int(self.split('-')[0]) < int(self.split('-')[1]) && int(self.split('-')[1]) <= 65535": (
        lambda ports, _: _is_port_range(ports)
    ),
    # TrainingJob
    "self.metadata.name.size() <= 40 && self.metadata.name.matches('^[a-z]([a-z0-9-]*[a-z0-9])?$')": (
        lambda job, _: (
            len(job["metadata"]["name"]) <= 40 and _NAME_PATTERN.fullmatch(job["metadata"]["name"]) is not None
        )
    ),
    f"self.spec.template == oldSelf.spec.template || {_SUSPENDED_EXPRESSION}": (
        lambda job, old: job["spec"]["template"] == old["spec"]["template"] or _was_suspended(old)
    ),
    "(has(self.spec.trainerContainer) ? self.spec.trainerContainer : '') == (has(oldSelf.spec.trainerContainer) "
    f"? oldSelf.spec.trainerContainer : '') || {_SUSPENDED_EXPRESSION}": (
        lambda job, old: (
            job["spec"].get("trainerContainer") == old["spec"].get("trainerContainer") or _was_suspended(old)
        )
    ),
    f"self.spec.nprocPerNode == oldSelf.spec.nprocPerNode || {_SUSPENDED_EXPRESSION}": (
        lambda job, old: job["spec"]["nprocPerNode"] == old["spec"]["nprocPerNode"] or _was_suspended(old)
    ),
    "(self.spec.checkpoint.path == oldSelf.spec.checkpoint.path "
    "&& self.spec.checkpoint.everySteps == oldSelf.spec.checkpoint.everySteps "
    "&& self.spec.checkpoint.readOnly == oldSelf.spec.checkpoint.readOnly "
    "&& self.spec.checkpoint.accessMode == oldSelf.spec.checkpoint.accessMode "
    "&& (has(self.spec.checkpoint.volumeClaimName) ? self.spec.checkpoint.volumeClaimName : '') "
    "== (has(oldSelf.spec.checkpoint.volumeClaimName) ? oldSelf.spec.checkpoint.volumeClaimName : '') "
    "&& (has(self.spec.checkpoint.uri) ? self.spec.checkpoint.uri : '') "
    "== (has(oldSelf.spec.checkpoint.uri) ? oldSelf.spec.checkpoint.uri : '') "
    "&& has(self.spec.checkpoint.subPath) == has(oldSelf.spec.checkpoint.subPath) "
    "&& (has(self.spec.checkpoint.subPath) ? self.spec.checkpoint.subPath : '') "
    "== (has(oldSelf.spec.checkpoint.subPath) ? oldSelf.spec.checkpoint.subPath : '') "
    "&& (has(self.spec.checkpoint.adopt) ? self.spec.checkpoint.adopt : '') "
    "== (has(oldSelf.spec.checkpoint.adopt) ? oldSelf.spec.checkpoint.adopt : '')) "
    f"|| {_SUSPENDED_EXPRESSION}": lambda job, old: _is_same_storage(job, old) or _was_suspended(old),
    "!has(self.minReplicas) || self.minReplicas <= self.replicas": (
        lambda spec, _: bool(spec.get("minReplicas", 0) <= spec["replicas"])
    ),
    "has(self.trainerContainer) ? self.template.spec.containers.exists(c, c.name == self.trainerContainer) "
    ": self.template.spec.containers.size() == 1 || self.template.spec.containers.exists(c, c.name == 'trainer') "
    "|| self.template.spec.containers.exists_one(c, has(c.resources) && has(c.resources.limits) "
    f"&& has(c.resources.limits.{_GPU_CEL_MEMBER}))": _names_trainer,
    "self.template.spec.containers.all(c, (has(self.trainerContainer) && c.name != self.trainerContainer) "
    "|| (!has(self.trainerContainer) && c.name != 'trainer' && self.template.spec.containers.exists(t, "
    "t.name == 'trainer')) || !has(c.resources) || !has(c.resources.limits) "
    f"|| !has(c.resources.limits.{_GPU_CEL_MEMBER}) || self.nprocPerNode <= "
    f"int(c.resources.limits.{_GPU_CEL_MEMBER}))": _has_enough_gpus,
    "!has(self.checkpoint.volumeClaimName) || self.template.spec.containers.all(c, (has(self.trainerContainer) "
    "? c.name != self.trainerContainer : c.name != 'trainer' && self.template.spec.containers.size() > 1) "
    "|| !has(c.volumeMounts) || c.volumeMounts.all(m, m.mountPath != self.checkpoint.path))": _build_mount_check(
        "volumeClaimName"
    ),
    "!has(self.checkpoint.uri) || self.template.spec.containers.all(c, (has(self.trainerContainer) "
    "? c.name != self.trainerContainer : c.name != 'trainer' && self.template.spec.containers.size() > 1) "
    "|| !has(c.volumeMounts) || c.volumeMounts.all(m, m.mountPath != self.checkpoint.path))": _build_mount_check("uri"),
    "!has(self.uri) || !has(self.volumeClaimName)": (
        lambda checkpoint, _: "uri" not in checkpoint or "volumeClaimName" not in checkpoint
    ),
    "!has(self.uri) || self.path == '/checkpoints'": (
        lambda checkpoint, _: "uri" not in checkpoint or checkpoint["path"] == "/checkpoints"
    ),
    "!has(self.accessMode) || self.accessMode != 'ReadWriteOnce' || has(self.volumeClaimName)": (
        lambda checkpoint, _: checkpoint.get("accessMode") != "ReadWriteOnce" or "volumeClaimName" in checkpoint
    ),
    "!has(self.accessMode) || self.accessMode != 'ReadWriteOnce' || self.path == '/checkpoints'": (
        lambda checkpoint, _: checkpoint.get("accessMode") != "ReadWriteOnce" or checkpoint["path"] == "/checkpoints"
    ),
    "self.matches('^[a-z][a-z0-9+.-]*://[^ ?#]*[^ ?#/]$') && !self.contains('::') && !self.matches('/[.][.]?(/|$)')": (
        lambda uri, _: (
            re.fullmatch("[a-z][a-z0-9+.-]*://[^ ?#]*[^ ?#/]", uri) is not None
            and "::" not in uri
            and re.search("/[.][.]?(/|$)", uri) is None
        )
    ),
    "!self.matches('^(memory|claim|https?|data|zip|tar|reference|github|git)://')": (
        lambda uri, _: re.match("(memory|claim|https?|data|zip|tar|reference|github|git)://", uri) is None
    ),
    "!self.matches('^[^/]*//[^/]*:[^/]*@')": lambda uri, _: re.match("[^/]*//[^/]*:[^/]*@", uri) is None,
    "self.all(key, !key.startsWith('pacekeeper.dev/'))": (
        lambda keys, _: not any(key.startswith("pacekeeper.dev/") for key in keys)
    ),
    "!has(self.restartPolicy) || self.restartPolicy == 'Never'": (
        lambda spec, _: spec.get("restartPolicy", "Never") == "Never"
    ),
    "!has(self.nodeName) || self.nodeName == ''": lambda spec, _: spec.get("nodeName", "") == "",
    "self.all(c, c.name != 'pacekeeper-sidecar')": (
        lambda containers, _: all(c["name"] != "pacekeeper-sidecar" for c in containers)
    ),
    "self.all(c, !has(c.ports) || c.ports.all(p, p.containerPort != 9464))": (
        lambda containers, _: all(port["containerPort"] != 9464 for c in containers for port in c.get("ports", ()))
    ),
    "self.all(e, !e.name.startsWith('PACEKEEPER_') || e.name in ['PACEKEEPER_KILL_SECONDS', "
    "'PACEKEEPER_GATHER_SECONDS', 'PACEKEEPER_IMPORT_SECONDS', 'PACEKEEPER_CONTACT_SECONDS', "
    "'PACEKEEPER_PHASE_SECONDS', 'PACEKEEPER_LINGER_SECONDS', 'PACEKEEPER_PEER_REPLICA_MEGABYTES', "
    "'PACEKEEPER_PEER_SAVES', 'PACEKEEPER_LAUNCH_SCRIPT'])": (
        lambda variables, _: (
            not any(
                variable["name"].startswith("PACEKEEPER_") and variable["name"] not in OVERRIDABLE_VARIABLES
                for variable in variables
            )
        )
    ),
    "self.all(m, m.mountPath != '/run/pacekeeper' && !m.mountPath.startsWith('/run/pacekeeper/') "
    "&& !m.mountPath.startsWith('/var/run/secrets/pacekeeper'))": (
        lambda mounts, _: (
            not any(
                mount["mountPath"] == "/run/pacekeeper"
                or mount["mountPath"].startswith(("/run/pacekeeper/", "/var/run/secrets/pacekeeper"))
                for mount in mounts
            )
        )
    ),
    "type(self) == int ? self >= 0 : self.matches('^[0-9]{1,4}$')": (
        lambda value, _: value >= 0 if isinstance(value, int) else re.fullmatch("[0-9]{1,4}", value) is not None
    ),
    "self.all(v, !v.name.startsWith('pacekeeper-'))": (
        lambda volumes, _: not any(volume["name"].startswith("pacekeeper-") for volume in volumes)
    ),
    "self.matches('^/[^:]*[^:/]$') && !self.contains('/../') && !self.endsWith('/..')": (
        lambda path, _: re.fullmatch("/[^:]*[^:/]", path) is not None and "/../" not in path and path[-3:] != "/.."
    ),
    "self != '/run/pacekeeper' && !self.startsWith('/run/pacekeeper/') && self != '/dev/shm'": (
        lambda path, _: path not in ("/run/pacekeeper", "/dev/shm") and not path.startswith("/run/pacekeeper/")
    ),
    "self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')": (
        lambda name, _: re.fullmatch("[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name) is not None
    ),
    "self == '' || self.split('/').all(part, part != '' && part != '.' && part != '..')": (
        lambda path, _: _is_inside(path)
    ),
    "type(self) == int ? self >= 1 && self <= 86400 : self == 'auto'": (
        lambda value, _: 1 <= value <= 86400 if isinstance(value, int) else value == "auto"
    ),
}

RULES_NOT_SIMULATED: Mapping[str, str] = {}
"""Rules without an equivalent, each with the reason."""
