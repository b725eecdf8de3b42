"""Cables (veth pairs) between network namespaces: plugged or unplugged, with a limited or full rate."""

from __future__ import annotations

from dataclasses import dataclass

from testcluster.shell import run_command


@dataclass(frozen=True)
class CableEnd:
    """One end of a cable. `namespace`: of the device; "": the machine's own."""

    namespace: str
    device: str

    def set_plugged(self, up: bool) -> None:
        """Plug or unplug the cable. While it is unplugged, nothing passes in either direction."""
        run_command("ip", *self.namespace_options, "link", "set", self.device, "up" if up else "down")

    def limit_rate(self, rate: str, latency: str = "400ms") -> None:
        """Limit what is sent from this end to `rate` (in tc's format: 50mbit); "": no limit.

        Packets that would wait longer than `latency` are dropped.
        """
        shaper = ["tbf", "rate", rate, "burst", "64kb", "latency", latency] if rate else ["noqueue"]
        run_command("tc", *self.namespace_options, "qdisc", "replace", "dev", self.device, "root", *shaper)

    def limit_rate_to_subnet(self, subnet: str, rate: str) -> None:
        """Limit what is sent to addresses in `subnet`. Other traffic is not limited."""
        tc, device_options = ["tc", *self.namespace_options], ["dev", self.device]
        run_command(*tc, "qdisc", "replace", *device_options, "root", "handle", "1:", "htb", "default", "1")
        for class_id, class_rate in (("1:1", "100gbit"), ("1:2", rate)):
            class_options = ["classid", class_id, "htb", "rate", class_rate, "quantum", "60000"]
            run_command(*tc, "class", "replace", *device_options, "parent", "1:", *class_options)
        self.assign_lane("1:2", "ip", "dst", subnet, priority=2)

    def assign_lane(self, lane: str, *matched: str, priority: int) -> None:
        """Assign the traffic that tc's u32 matches to a lane ("1:1": not limited). Lower priorities are first.

        Call it after `limit_rate_to_subnet`.
        """
        filter_options = ["protocol", "ip", "prio", str(priority), "u32", "match", *matched, "flowid", lane]
        run_command(
            "tc", *self.namespace_options, "filter", "replace", "dev", self.device, "parent", "1:", *filter_options
        )

    @property
    def namespace_options(self) -> list[str]:
        """Options of `ip` and `tc` that select the namespace."""
        return ["-n", self.namespace] if self.namespace else []


@dataclass(frozen=True)
class Cable:
    """A cable between a machine, at its `near` end, and the network."""

    near: CableEnd
    far: CableEnd
