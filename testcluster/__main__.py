"""The command line: `python -m testcluster --help`."""

from __future__ import annotations

import argparse
import sys

import yaml

from testcluster import cluster, fabric, faults, programs
from testcluster.settings import KUBECONFIG
from testcluster.shell import ClusterError


def main() -> int:
    arguments = _build_parser().parse_args()
    try:
        _run_verb(arguments)
    except (ClusterError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run_verb(arguments: argparse.Namespace) -> None:  # noqa: C901  # one line per verb
    match arguments.verb:
        case "programs":
            programs.ensure_all()
        case "up":
            cluster.bring_up(arguments.nodes, arguments.fabric, arguments.gangs)
            print(f"export KUBECONFIG={KUBECONFIG}")
        case "down":
            cluster.tear_down()
        case "status":
            print(cluster.list_status())
        case "node-down":
            faults.disconnect_node(arguments.node)
        case "node-up":
            faults.reconnect_node(arguments.node)
        case "slow-link":
            faults.slow_link(arguments.node, arguments.rate)
        case "clear-link":
            faults.clear_link(arguments.node)
        case "cut-uplink":
            faults.cut_uplink(arguments.leaf, arguments.spine, propagate=not arguments.unannounced)
        case "slow-uplink":
            faults.slow_uplink(arguments.leaf, arguments.spine, arguments.rate)
        case "heal-uplink":
            faults.heal_uplink(arguments.leaf, arguments.spine)
        case "shape-uplinks":
            faults.shape_uplinks(arguments.rate)
        case "fabric":
            print(yaml.safe_dump(fabric.build_manifest(), sort_keys=False), end="")
        case "container":
            target = faults.find_container(*arguments.container)
            print(f"node    {target.node}\ncgroup  {target.cgroup}\npids    {' '.join(map(str, target.pids()))}")
        case "cpu-quota":
            namespace, pod, container = arguments.container
            faults.set_cpu_quota(namespace, pod, container, arguments.millicores)
        case "prometheus-stop":
            faults.stop_prometheus()
        case "prometheus-start":
            faults.start_prometheus()
        case "apiserver-restart":
            faults.restart_api_server()


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m testcluster", description="A real Kubernetes on this machine.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    verbs.add_parser("programs", help="build and install all programs that the cluster and its tests need")
    up = verbs.add_parser("up", help="bring the cluster up, or repair it; prints the KUBECONFIG")
    up.add_argument("--nodes", type=int, help="worker nodes (6)")
    up.add_argument(
        "--fabric",
        type=int,
        choices=range(fabric.MAX_PORTS + 1),
        help="ports of each node into a leaf–spine network for the pods' traffic; 0: there is none",
    )
    up.add_argument(
        "--gangs",
        action=argparse.BooleanOptionalAction,
        help="whether the scheduler places pods of a PodGroup together (alpha in Kubernetes 1.36)",
    )
    verbs.add_parser("down", help="end it and remove everything but the logs")
    verbs.add_parser("status", help="what runs")

    node_down = verbs.add_parser("node-down", help="unplug a node's network cables")
    node_up = verbs.add_parser("node-up", help="plug them in again")
    slow_link = verbs.add_parser("slow-link", help="slow a node's network down, in both directions")
    clear_link = verbs.add_parser("clear-link", help="restore the full speed")
    for verb in (node_down, node_up, slow_link, clear_link):
        verb.add_argument("node", help="such as node-1")
    slow_link.add_argument("rate", help="in tc's format: 50mbit")

    cut_uplink = verbs.add_parser("cut-uplink", help="cut a link between a leaf and a spine of the fabric")
    cut_uplink.add_argument("--unannounced", action="store_true", help="do not inform the other leaves: a black hole")
    slow_uplink = verbs.add_parser("slow-uplink", help="slow it down, in both directions")
    heal_uplink = verbs.add_parser("heal-uplink", help="restore the link")
    for verb in (cut_uplink, slow_uplink, heal_uplink):
        verb.add_argument("leaf", help="such as l1")
        verb.add_argument("spine", help="such as s1")
    shape_uplinks = verbs.add_parser("shape-uplinks", help="set the rate of all links between leaves and spines")
    slow_uplink.add_argument("rate", help="50mbit, 1gbit")
    shape_uplinks.add_argument("rate", nargs="?", default="", help="50mbit, 1gbit; none: not limited")
    verbs.add_parser("fabric", help="print the `Fabric` that describes it, with the present state of its links")

    container = verbs.add_parser("container", help="print node, cgroup, and host processes of a container")
    cpu_quota = verbs.add_parser("cpu-quota", help="change a container's CPU limit while it runs")
    for verb in (container, cpu_quota):
        verb.add_argument("container", type=_parse_container, metavar="NAMESPACE/POD/CONTAINER")
    cpu_quota.add_argument("millicores", type=int)

    verbs.add_parser("prometheus-stop", help="stop Prometheus")
    verbs.add_parser("prometheus-start", help="start it again")
    verbs.add_parser("apiserver-restart", help="kill the API server and start it again")
    return parser


def _parse_container(text: str) -> tuple[str, str, str]:
    try:
        namespace, pod, container = text.split("/")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAMESPACE/POD/CONTAINER") from error
    return namespace, pod, container


if __name__ == "__main__":
    sys.exit(main())
