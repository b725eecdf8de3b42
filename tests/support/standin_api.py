"""TEMPORARY."""
from dataclasses import dataclass
import math
from simulation.kubernetes.objects import merged, timestamp
from simulation.kubernetes.faults import ApiFaults

@dataclass(frozen=True)
class Change:
    type: str; plural: str; object: dict; before: dict | None; who: str; at: float; verb: str

class ApiServer:
    def __init__(self, world):
        self.world, self.faults, self.store, self.calls, self.rv = world, ApiFaults(), {}, [], 0
    def subscribe(self, call): self.calls.append(call)
    def get(self, plural, name, namespace=""): return self.store.get((plural, namespace, name))
    def all(self, plural, namespace=""): return [b for (p, n, _), b in self.store.items() if p == plural and (not namespace or n == namespace)]
    def _emit(self, type_, plural, body, before, who, verb):
        for call in list(self.calls): call(Change(type_, plural, body, before, who, self.world.now(), verb))
    def _put(self, plural, body, before, who, verb):
        m = body["metadata"]; self.rv += 1
        body = {**body, "metadata": {**m, "resourceVersion": str(self.rv)}}
        self.store[plural, m.get("namespace", ""), m["name"]] = body
        self._emit("MODIFIED" if before else "ADDED", plural, body, before, who, verb)
        return body
    def create(self, plural, body, *, manager="world", dry_run=False):
        m = body["metadata"]; assert (plural, m.get("namespace", ""), m["name"]) not in self.store
        self.rv += 1
        meta = {**m, "uid": f"uid-{self.rv}", "creationTimestamp": timestamp(int(self.world.wall()))}
        body = {**body, "metadata": meta}
        if plural == "pods": body = {**body, "status": {"phase": "Pending"}}
        if plural == "namespaces": body = {"spec": {"finalizers": ["kubernetes"]}, "status": {}, **body}
        return self._put(plural, body, None, manager, "create")
    def patch(self, plural, name, namespace, patch, *, subresource="", manager="world"):
        if subresource == "binding": return self.bind(name, namespace, patch["spec"]["nodeName"])
        before = self.store[plural, namespace, name]
        after = merged(before, patch)
        return before if after is before else self._put(plural, after, before, manager, "patch")
    def bind(self, name, namespace, node):
        b = self.get("pods", name, namespace)
        c = [x for x in b["status"].get("conditions", []) if x["type"] != "PodScheduled"]
        self._put("pods", {**b, "spec": {**b["spec"], "nodeName": node}, "status": {**b["status"], "conditions": [*c, {"type": "PodScheduled", "status": "True"}]}}, b, "scheduler", "bind")
    def delete(self, plural, name, namespace="", *, uid="", grace=None):
        b = self.store[plural, namespace, name]; m = b["metadata"]
        assert not uid or uid == m["uid"]
        if plural == "pods":
            if grace is None: grace = b["spec"].get("terminationGracePeriodSeconds", 30)
            if not b["spec"].get("nodeName") or b["status"].get("phase") in ("Succeeded", "Failed"): grace = 0
            if grace > 0:
                if m.get("deletionGracePeriodSeconds", math.inf) <= grace: return
                self._put(plural, {**b, "metadata": {**m, "deletionTimestamp": timestamp(int(self.world.wall() + grace)), "deletionGracePeriodSeconds": grace}}, b, "x", "delete"); return
        del self.store[plural, namespace, name]
        self._emit("DELETED", plural, b, b, "x", "delete")
