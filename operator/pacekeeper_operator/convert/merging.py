"""Templates of pods that have ranks of one job: they are merged if they start the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..api.names import Object
from .commands import drop_topology_options
from .draft import ConversionRefused, Draft
from .fields import is_empty
from .pod_templates import TemplateSource, check_template, choose_trainer
from .ranks import count_gpus


def merge_templates(draft: Draft, templates: Mapping[str, object], source: TemplateSource) -> Object:
    """Return the template of all workers: the last of `templates`, which maps paths in the source to them.

    What differs in the others is noted. Raises ConversionRefused if they start other programs, or have other GPUs.
    """
    *others, (base_path, last) = templates.items()
    base = check_template(last, base_path)
    for path, other in others:
        body = check_template(other, path)
        _require_same_start(body, path, base, base_path, source)
        differences = dict.fromkeys([*find_differences(body, base, path), *find_differences(base, body, path)])
        if differences:
            draft.note_changed(f"{base_path} holds for all workers, and differs here: check it", *differences)
        draft.note_taken(f"spec.template, as {base_path} is the same but for what is named here", path)
    return base


def _require_same_start(one: Object, path: str, other: Object, other_path: str, source: TemplateSource) -> None:
    trainers = [choose_trainer(body["spec"], source) for body in (one, other)]
    starts = [
        (
            container.get("image"),
            drop_topology_options([*(container.get("command") or ()), *(container.get("args") or ())]),
            count_gpus(container),
        )
        for container in trainers
    ]
    for name, first, second in zip(("image", "command", "number of GPUs"), *starts, strict=True):
        if first != second:
            raise ConversionRefused(
                f"{path} and {other_path} differ in their {name}, but workers of a TrainingJob have one template; "
                "if both have ranks of one job, give them the same; otherwise convert only the part with the ranks"
            )


def find_differences(one: Any, other: Any, path: str) -> Iterator[str]:
    """Yield the paths in `one` whose values `other` does not have."""
    if isinstance(one, dict) and isinstance(other, dict):
        is_keyed = path.endswith((".labels", ".annotations"))
        for name, value in one.items():
            yield from find_differences(value, other.get(name), f"{path}[{name}]" if is_keyed else f"{path}.{name}")
    elif _is_named_list(one) and _is_named_list(other):
        others = {item["name"]: item for item in other}
        for item in one:
            yield from find_differences(item, others.get(item["name"]), f"{path}[{item['name']}]")
    elif one != other and not is_empty(one):
        yield path


def merge_patch(base: Any, patch: Any) -> Any:
    """Return `base` with the fields of `patch`, as a strategic merge does.

    Items of lists are identified by their `name`, or by the `mountPath` of a mount. Other lists are replaced.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{name: merge_patch(base.get(name), value) for name, value in patch.items()}}
    for key in ("mountPath", "name"):
        if _is_keyed_list(base, key) and _is_keyed_list(patch, key):
            items = {item[key]: item for item in base}
            for item in patch:
                items[item[key]] = merge_patch(items.get(item[key]), item)
            return list(items.values())
    return patch


def _is_named_list(value: object) -> bool:
    """Return whether items are identified by name. Mounts have the name of their volume, which may repeat."""
    return _is_keyed_list(value, "name") and not _is_keyed_list(value, "mountPath")


def _is_keyed_list(value: object, key: str) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and key in item for item in value)
