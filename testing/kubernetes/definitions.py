"""Resource definitions of two versions: what the one refuses or drops of what the other took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from testing.kubernetes.chart import REPOSITORY

CURRENT = REPOSITORY / "crds"
PREVIOUS = REPOSITORY / "tests/data/definitions"
"""Of the version before: at a release, what `crds/` holds is copied there."""

_OUR_VARIABLES = "self.all(e, !e.name.startsWith('PACEKEEPER_'))"
_ALLOWED_VARIABLES = (
    "self.all(e, !e.name.startsWith('PACEKEEPER_') || e.name in ['PACEKEEPER_KILL_SECONDS', "
    "'PACEKEEPER_GATHER_SECONDS', 'PACEKEEPER_IMPORT_SECONDS', 'PACEKEEPER_CONTACT_SECONDS', "
    "'PACEKEEPER_PHASE_SECONDS', 'PACEKEEPER_LINGER_SECONDS', 'PACEKEEPER_PEER_REPLICA_MEGABYTES', "
    "'PACEKEEPER_PEER_SAVES', 'PACEKEEPER_LAUNCH_SCRIPT'])"
)
_SUSPENDED = (
    "|| (oldSelf.spec.suspend && (!has(oldSelf.status) || !has(oldSelf.status.phase) "
    "|| oldSelf.status.phase == 'Suspended'))"
)
_STORAGE = (
    "(self.spec.checkpoint.path == oldSelf.spec.checkpoint.path "
    "&& self.spec.checkpoint.everySteps == oldSelf.spec.checkpoint.everySteps "
)
_SAME_CLAIM = (
    "&& (has(self.spec.checkpoint.volumeClaimName) ? self.spec.checkpoint.volumeClaimName : '') "
    "== (has(oldSelf.spec.checkpoint.volumeClaimName) ? oldSelf.spec.checkpoint.volumeClaimName : '')"
)
_SAME_URI = (
    " && (has(self.spec.checkpoint.uri) ? self.spec.checkpoint.uri : '') "
    "== (has(oldSelf.spec.checkpoint.uri) ? oldSelf.spec.checkpoint.uri : '')"
)
_SAME_FOLDER = (
    " && has(self.spec.checkpoint.subPath) == has(oldSelf.spec.checkpoint.subPath) "
    "&& (has(self.spec.checkpoint.subPath) ? self.spec.checkpoint.subPath : '') "
    "== (has(oldSelf.spec.checkpoint.subPath) ? oldSelf.spec.checkpoint.subPath : '') "
    "&& (has(self.spec.checkpoint.adopt) ? self.spec.checkpoint.adopt : '') "
    "== (has(oldSelf.spec.checkpoint.adopt) ? oldSelf.spec.checkpoint.adopt : '')"
)
_READ_ONLY = "&& self.spec.checkpoint.readOnly == oldSelf.spec.checkpoint.readOnly "
_ACCESS_MODE = "&& self.spec.checkpoint.accessMode == oldSelf.spec.checkpoint.accessMode "
WIDER = {
    _OUR_VARIABLES: _ALLOWED_VARIABLES,
    # The same of all that the version before defines.
    f"{_STORAGE}{_SAME_CLAIM}) {_SUSPENDED}": (
        f"{_STORAGE}{_READ_ONLY}{_ACCESS_MODE}{_SAME_CLAIM}{_SAME_URI}{_SAME_FOLDER}) {_SUSPENDED}"
    ),
}
"""Rule → the one in its place that lets more through. At a release: those of the version before go."""
_NO_CLAIM_NEXT_TO_URI = "!has(self.uri) || !has(self.volumeClaimName)"
_NO_PATH_NEXT_TO_URI = "!has(self.uri) || self.path == '/checkpoints'"
_CLAIM_OF_ACCESS_MODE = "!has(self.accessMode) || self.accessMode != 'ReadWriteOnce' || has(self.volumeClaimName)"
_NO_PATH_NEXT_TO_SERVER = "!has(self.accessMode) || self.accessMode != 'ReadWriteOnce' || self.path == '/checkpoints'"
_OTHER_CONTAINER = (
    "(has(self.trainerContainer) ? c.name != self.trainerContainer "
    ": c.name != 'trainer' && self.template.spec.containers.size() > 1)"
)
_NO_MOUNT = "|| !has(c.volumeMounts) || c.volumeMounts.all(m, m.mountPath != self.checkpoint.path))"
_NO_MOUNT_NEXT_TO_URI = (
    f"!has(self.checkpoint.uri) || self.template.spec.containers.all(c, {_OTHER_CONTAINER} {_NO_MOUNT}"
)
_NAMED_TRAINER = (
    "has(self.trainerContainer) ? self.template.spec.containers.exists(c, c.name == self.trainerContainer) "
    ": self.template.spec.containers.size() == 1 || self.template.spec.containers.exists(c, c.name == 'trainer') "
    "|| self.template.spec.containers.exists_one(c, has(c.resources) && has(c.resources.limits) "
    "&& has(c.resources.limits.nvidia__dot__com__slash__gpu))"
)
_SAME_TRAINER = (
    "(has(self.spec.trainerContainer) ? self.spec.trainerContainer : '') "
    f"== (has(oldSelf.spec.trainerContainer) ? oldSelf.spec.trainerContainer : '') {_SUSPENDED}"
)
_ENOUGH_GPUS = (
    "|| !has(c.resources) || !has(c.resources.limits) || !has(c.resources.limits.nvidia__dot__com__slash__gpu) "
    "|| self.nprocPerNode <= int(c.resources.limits.nvidia__dot__com__slash__gpu))"
)
WIDER |= {
    f"self.template.spec.containers.all(c, c.name != 'trainer' {_ENOUGH_GPUS}": (
        "self.template.spec.containers.all(c, (has(self.trainerContainer) && c.name != self.trainerContainer) "
        "|| (!has(self.trainerContainer) && c.name != 'trainer' && self.template.spec.containers.exists(t, "
        f"t.name == 'trainer')) {_ENOUGH_GPUS}"
    ),
    f"!has(self.checkpoint.volumeClaimName) || self.template.spec.containers.all(c, c.name != 'trainer' {_NO_MOUNT}": (
        f"!has(self.checkpoint.volumeClaimName) || self.template.spec.containers.all(c, {_OTHER_CONTAINER} {_NO_MOUNT}"
    ),
}
GONE = frozenset({"self.exists(c, c.name == 'trainer')"})
"""Rules of the version before that have none in their place. At a release: they go."""
OF_NEW_FIELDS = frozenset(
    {_NO_CLAIM_NEXT_TO_URI, _NO_PATH_NEXT_TO_URI, _NO_MOUNT_NEXT_TO_URI, _NAMED_TRAINER, _SAME_TRAINER}
    | {_CLAIM_OF_ACCESS_MODE, _NO_PATH_NEXT_TO_SERVER}
)
"""Rules that hold for all objects without a field that the version before does not define. At a release: they go."""
_MIN_KEYWORDS = ("minimum", "minLength", "minItems", "minProperties")
_MAX_KEYWORDS = ("maximum", "maxLength", "maxItems", "maxProperties")


def read_definitions(folder: Path) -> dict[str, dict[str, Any]]:
    """By name, like incidents.pacekeeper.dev."""
    definitions = [yaml.load(path.read_text(), Loader=yaml.CSafeLoader) for path in sorted(folder.glob("*.yaml"))]
    return {definition["metadata"]["name"]: definition for definition in definitions}


def read_served_schemas(definition: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The schemas of the versions that are served."""
    served = [version for version in definition["spec"]["versions"] if version["served"]]
    return {version["name"]: version["schema"]["openAPIV3Schema"] for version in served}


def find_narrowed(before: dict[str, Any], after: dict[str, Any], path: str = "") -> Iterator[str]:
    """Where objects that keep to the schema `before` may break the schema `after`, or lose a field to it."""
    if before.get("type") != after.get("type"):
        yield f"{path}: is of another type"
        return
    for name in ("pattern", "format"):
        if after.get(name) not in (None, before.get(name)):
            yield f"{path}: has another {name}"
    if "enum" in after and not ("enum" in before and set(before["enum"]) <= set(after["enum"])):
        yield f"{path}: takes fewer values"
    if any(name in after and after[name] > before.get(name, float("-inf")) for name in _MIN_KEYWORDS) or any(
        name in after and after[name] < before.get(name, float("inf")) for name in _MAX_KEYWORDS
    ):
        yield f"{path}: has narrower bounds"
    for rule in sorted(list_rules(after) - list_rules(before) - OF_NEW_FIELDS):
        if rule not in {WIDER.get(old_rule) for old_rule in list_rules(before)}:
            narrows = rule in GONE or WIDER.get(rule) in list_rules(before)
            yield f"{path}: takes fewer values" if narrows else f"{path}: has a new rule"
    old_properties, new_properties = before.get("properties", {}), after.get("properties", {})
    for name in sorted(set(after.get("required", ())) - set(before.get("required", ()))):
        if "default" not in new_properties.get(name, {}):
            yield f"{path}.{name}: is required"
    if not after.get("x-kubernetes-preserve-unknown-fields"):
        yield from (f"{path}.{name}: is gone" for name in sorted(old_properties.keys() - new_properties.keys()))
    for name in sorted(old_properties.keys() & new_properties.keys()):
        yield from find_narrowed(old_properties[name], new_properties[name], f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(before.get(name), dict) and isinstance(after.get(name), dict):
            yield from find_narrowed(before[name], after[name], f"{path}[]")


def list_rules(schema: dict[str, Any]) -> set[str]:
    return {rule["rule"] for rule in schema.get("x-kubernetes-validations", ())}
