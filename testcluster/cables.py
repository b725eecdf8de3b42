"""Cables (veth pairs) between network namespaces: plugged in and pulled out, slow and fast."""

from __future__ import annotations

from dataclasses import dataclass

from testcluster.shell import run_command


@dataclass(frozen=True)
class CableEnd:
    """Of a cable. `namespace`: of the device; "": the machine itself."""

    namespace: str
    device: str

    def set_plugged(self, up: bool) -> None:
        """In, or out: then nothing passes, either way."""
        run_command("ip", *self.namespace_options, "link", "set", self.device, "up" if up else "down")

    def limit_rate(self, rate: str, latency: str = "400ms") -> None:
        """What is sent from here, to `rate` (in tc's words: 50mbit); "": to nothing. What would wait longer than
        `latency` is dropped."""
        shaper = ["tbf", "rate", rate, "burst", "64kb", "latency", latency] if rate else ["noqueue"]
        run_command("tc", *self.namespace_options, "qdisc", "replace", "dev", self.device, "root", *shaper)

    def limit_rate_to_subnet(self, subnet: str, rate: str) -> None:
        """The same of what is sent to addresses in `subnet`; all else is as fast as before."""
        tc, on = ["tc", *self.namespace_options], ["dev", self.device]
        run_command(*tc, "qdisc", "replace", *on, "root", "handle", "1:", "htb", "default", "1")
        for name, its_rate in (("1:1", "100gbit"), ("1:2", rate)):
            its = ["classid", name, "htb", "rate", its_rate, "quantum", "60000"]
            run_command(*tc, "class", "replace", *on, "parent", "1:", *its)
        self.assign_lane("1:2", "ip", "dst", subnet, priority=2)

    def assign_lane(self, lane: str, *matched: str, priority: int) -> None:
        """After `limit_rate_to_subnet`: what tc's u32 matches goes by this lane ("1:1": as fast as before). Lower is first."""
        its = ["protocol", "ip", "prio", str(priority), "u32", "match", *matched, "flowid", lane]
        run_command("tc", *self.namespace_options, "filter", "replace", "dev", self.device, "parent", "1:", *its)

    @property
    def namespace_options(self) -> list[str]:
        """Options of `ip` and `tc`."""
        return ["-n", self.namespace] if self.namespace else []


@dataclass(frozen=True)
class Cable:
    """Between a machine, at its `near` end, and the network."""

    near: CableEnd
    far: CableEnd
