"""The command `kubectl pacekeeper`: its verbs."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.profiling.command import parse_profile_window
from pacekeeper_analysis.profiling.localize import describe_localization
from pacekeeper_analysis.profiling.report import render_profile_html
from pacekeeper_analysis.protocol.decoding import parse_json

from ..api.names import ANNOTATION_PROFILE, LABEL_JOB, PAUSE_CONFIG_MAP, WATCH_CONFIG_MAP, Object
from ..api.node_history import NodeHistory
from ..api.training_job import JobPhase, RemediationMode, RequestedSyncMode
from ..async_runtime import raise_recursion_limit
from . import bill, convert, incidents, jobs, links, nodes, pods, report, watched, whatif
from .kubectl import Kubectl, KubectlError, KubectlNotFound
from .loaded_objects import LoadedIncident, LoadedJob, LoadedQuarantine, LoadedWatchedJob, parse_newest_first
from .text import format_paragraph

Found = TypeVar("Found")

JOB_RESOURCE, INCIDENT_RESOURCE, QUARANTINE_RESOURCE, PROFILE_RESOURCE = (
    "trainingjobs",
    "incidents",
    "nodequarantines",
    "profilewindows",
)
HISTORY_RESOURCE, WATCHED_RESOURCE = "nodehistories", "watchedjobs"
DEFAULT_BILL_DAYS = 7
JSON_OUTPUT = Path("json")
"""Value of --output that prints one JSON object on standard output."""
PAGE_OPTION_HELP = {
    "report": "where the page is written (JOB.html); json: no page, for programs",
    "profile": "write a page with flame graphs (HTML); json: none, for programs",
    "bill": "write a page (HTML), with each incident; json: none, for programs",
}
NODE_RELEASE_TIMEOUT_SECONDS = 120.0
PROFILE_TIMEOUT_SECONDS, KUBECTL_POLL_INTERVAL_SECONDS = 180.0, 2.0
WINDOW_WRITE_TIMEOUT_SECONDS = 15.0
"""Longest wait for a profile after its event. The operator writes it some seconds later."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns 0, 1 if the cluster or the user refuses, 2 for invalid input, and 130 if interrupted.
    """
    arguments = _build_parser().parse_args(argv)
    if argv is None:  # only in the command's own process; a deeply nested job would otherwise hide all others
        raise_recursion_limit()
    options = tuple(f"--{name}={value}" for name in ("context", "kubeconfig") if (value := getattr(arguments, name)))
    kubectl = Kubectl(options, arguments.namespace, arguments.all_namespaces)
    try:
        verb: Callable[[Kubectl, argparse.Namespace], int] = arguments.verb
        return _run_as_json(verb, kubectl, arguments) if arguments.output == JSON_OUTPUT else verb(kubectl, arguments)
    except InputError as error:
        print(f"kubectl pacekeeper: {error}", file=sys.stderr)
        return 1 if isinstance(error, KubectlError) else 2
    except KeyboardInterrupt:
        return 130


def _run_as_json(
    verb: Callable[[Kubectl, argparse.Namespace], int], kubectl: Kubectl, arguments: argparse.Namespace
) -> int:
    """Run a verb, and print its text and the whole objects that it has read as JSON.

    Errors are text on standard error, and the exit status, as without JSON.
    """
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = verb(kubectl, arguments)
    objects = sorted(
        kubectl.objects_read.values(),
        key=lambda body: (body.get("kind", ""), body["metadata"].get("namespace", ""), body["metadata"]["name"]),
    )
    print(json.dumps({"text": output.getvalue().rstrip("\n"), "objects": objects}, indent=2))
    return status


def show_status(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    if arguments.job:
        loaded = _get_job(kubectl, arguments.job)
        print(jobs.format_status(loaded, _list_incidents(kubectl, loaded), time.time()))
        return 0
    loaded_jobs = [LoadedJob.from_object(body) for body in kubectl.list(JOB_RESOURCE)]
    print(
        jobs.format_overview(loaded_jobs, namespaces=kubectl.all_namespaces) if loaded_jobs else "no TrainingJobs here"
    )
    return 0


def show_why(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    loaded = _get_job(kubectl, arguments.job)
    print(
        jobs.explain_job(loaded, _list_incidents(kubectl, loaded), time.time(), _pods_that_do_not_run(kubectl, loaded))
    )
    return 0


def show_incidents(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    """Show one Incident, or those of a job (which may be deleted), or all."""
    shown = parse_newest_first(kubectl.list(INCIDENT_RESOURCE))
    selected = next((incident for incident in shown if incident.name == arguments.name), None)
    if selected is not None:
        print(incidents.format_incident(selected))
        return 0
    if arguments.name:
        shown = [incident for incident in shown if incident.spec.job_ref.name == arguments.name]
        if not shown:
            _get_job(kubectl, arguments.name)
    print(
        incidents.format_overview(shown, time.time(), namespaces=kubectl.all_namespaces)
        if shown
        else "no Incidents here"
    )
    return 0


def show_watched(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    if not arguments.name:
        loaded = [LoadedWatchedJob.from_object(body) for body in kubectl.list(WATCHED_RESOURCE)]
        print(watched.format_overview(loaded, namespaces=kubectl.all_namespaces) if loaded else "no watched jobs here")
        return 0
    found = [LoadedWatchedJob.from_object(body) for body in kubectl.list(WATCHED_RESOURCE)]
    selected = [job for job in found if arguments.name in (job.name, job.spec.root.name)]
    if not selected:
        raise KubectlNotFound(f"no watched job {arguments.name!r}; {_describe_existing(kubectl, WATCHED_RESOURCE)}")
    shown = parse_newest_first(kubectl.list(INCIDENT_RESOURCE))
    for job in selected:
        print(watched.format_job(job, [incident for incident in shown if incident.spec.job_ref.uid == job.uid]))
    return 0


def switch_injection(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    """Show whether new pods are watched, or switch that on or off. Running pods stay as they are."""
    location = (WATCH_CONFIG_MAP, f"--namespace={arguments.operator_namespace}")
    if arguments.state:
        data = {"enabled": "true" if arguments.state == "on" else "false", "reason": None}
        kubectl.run("patch", "configmap", *location, "--type=merge", "-p", json.dumps({"data": data}))
        print(f"pods that start from now on are {'' if arguments.state == 'on' else 'not '}watched, within seconds")
        return 0
    try:
        state = parse_json(kubectl.run("get", "configmap", *location, "-o", "json")).get("data") or {}
    except KubectlNotFound:
        state = {}
    print(format_paragraph(watched.describe_injection(state)))
    return 0


def show_bill(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    loaded = [LoadedWatchedJob.from_object(body) for body in kubectl.list(WATCHED_RESOURCE)]
    shown = parse_newest_first(kubectl.list(INCIDENT_RESOURCE))
    since = arguments.since
    summed = bill.build_bill(loaded, shown, since, _list_teams(kubectl, arguments.team_label), arguments.team)
    print(bill.format_bill(summed))
    if arguments.output is not None and arguments.output != JSON_OUTPUT:
        _write_page(arguments.output, bill.render_bill_page(summed, loaded, shown, time.time()))
    return 0


def _write_page(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output {output}: {error.strerror}") from error
    print(output)


def _list_teams(kubectl: Kubectl, label: str) -> Mapping[str, str]:
    """Return the team of each namespace that names one by this label."""
    if not label:
        return {}
    return {
        body["metadata"]["name"]: team
        for body in kubectl.list("namespaces", labels=label)
        if (team := body["metadata"].get("labels", {}).get(label))
    }


def _parse_since(text: str) -> str:
    """Return the first day of a period as an ISO date, UTC. Raises ArgumentTypeError for what is no period."""
    today = datetime.now(UTC).date()
    try:
        if text.endswith("d"):
            return (today - timedelta(days=int(text[:-1]))).isoformat()
        return date.fromisoformat(text).isoformat()
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give days, such as 7d, or a date, such as 2026-11-01") from error


def show_nodes(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    if not arguments.node:
        print(nodes.format_overview([NodeHistory.parse(body) for body in kubectl.list(HISTORY_RESOURCE)], time.time()))
        return 0
    try:
        body = kubectl.get(HISTORY_RESOURCE, arguments.node)
    except KubectlNotFound as error:
        raise KubectlNotFound(
            f"{error}\nIt had no Incidents. {_describe_existing(kubectl, HISTORY_RESOURCE)}"
        ) from error
    print(nodes.format_history(NodeHistory.parse(body), time.time()))
    return 0


def write_report(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    loaded = _get_job(kubectl, arguments.job)
    text = report.render_page(loaded, _list_incidents(kubectl, loaded), time.time())
    if arguments.output == JSON_OUTPUT:
        return 0
    output = arguments.output or Path(f"{loaded.job.name}.html")
    _write_page(output, text)
    return 0


def approve_quarantine(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    _require_yes_for_json(arguments)
    quarantine = _get_quarantine(kubectl, arguments.node)
    if quarantine.spec.approved:
        print(f"the quarantine of node {quarantine.node} is approved already")
        return 0
    if not _confirm_action(nodes.describe_approval(quarantine), "approve it", yes=arguments.yes):
        return 1
    kubectl.patch(QUARANTINE_RESOURCE, quarantine.node, {"spec": {"approved": True}})
    print(f"the quarantine of node {quarantine.node} is approved")
    return 0


def release_node(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    _require_yes_for_json(arguments)
    quarantine = _get_quarantine(kubectl, arguments.node)
    if not _confirm_action(nodes.describe_release(quarantine), "release it", yes=arguments.yes):
        return 1
    try:
        kubectl.delete(QUARANTINE_RESOURCE, quarantine.node, NODE_RELEASE_TIMEOUT_SECONDS)
    except KubectlNotFound:
        pass
    except KubectlError as error:
        raise KubectlError(
            f"{error}\nThe release waits for the operator. While that is away: "
            "python -m pacekeeper_operator release-all (docs/on-call.md)"
        ) from error
    print(f"node {quarantine.node} is released")
    return 0


def pause_remedies(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    """Pause remedies, not training."""
    if arguments.all:
        options = (f"--namespace={arguments.operator_namespace}", f"--from-literal=reason={arguments.reason}")
        kubectl.run("create", "configmap", PAUSE_CONFIG_MAP, *options)
        print("remedies are paused in the whole cluster; jobs continue, but faults are not repaired until: ")
        print("kubectl pacekeeper resume --all")
        return 0
    _set_remediation_mode(kubectl, _require_job_name(arguments), RemediationMode.RECOMMEND)
    print(f"remedies for {arguments.job} are recommended only: crashed ranks restart in place, lost pods are replaced,")
    print("and nothing else is done until:")
    print(f"kubectl pacekeeper resume {arguments.job}")
    return 0


def resume_remedies(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    if arguments.all:
        kubectl.run(
            "delete", "configmap", PAUSE_CONFIG_MAP, f"--namespace={arguments.operator_namespace}", "--ignore-not-found"
        )
        print("remedies are applied again, where the jobs allow them")
        return 0
    _set_remediation_mode(kubectl, _require_job_name(arguments), RemediationMode.ACT)
    print(f"remedies for {arguments.job} are applied again, as far as the installation's policy allows")
    return 0


def set_mode(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    _unfinished_job(kubectl, arguments.job)
    kubectl.patch(JOB_RESOURCE, arguments.job, {"spec": {"syncMode": arguments.mode}})
    message = (
        "the operator chooses the mode" if arguments.mode == RequestedSyncMode.AUTO else f"it stays in {arguments.mode}"
    )
    print(f"{arguments.job}: {message}")
    return 0


def set_restarts(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    _unfinished_job(kubectl, arguments.job)
    kubectl.patch(JOB_RESOURCE, arguments.job, {"spec": {"remediation": {"maxRestarts": arguments.number}}})
    print(f"{arguments.job}: faults may start {arguments.number} rounds within its restartWindow, effective at once")
    return 0


def profile_job(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    """Request a profile of the job's ranks, and wait for its result."""
    loaded = _get_job(kubectl, arguments.job)
    if loaded.status.phase is not JobPhase.RUNNING:
        raise InputError(f"{loaded.job.name} does not train now: kubectl pacekeeper why {loaded.job.name}")
    known_events, known_windows = _read_profile_events(kubectl, loaded), set(_list_windows(kubectl, loaded))
    kubectl.annotate(JOB_RESOURCE, loaded.job.name, ANNOTATION_PROFILE, f"{time.time():.0f}")
    print("the ranks profile some of their next steps …", file=sys.stderr)
    messages = _poll_until_found(
        lambda: [message for uid, message in _read_profile_events(kubectl, loaded).items() if uid not in known_events],
        arguments.timeout,
    )
    if not messages:
        raise KubectlError(
            f"no profile within {arguments.timeout:.0f} s: its steps take long, or its round has ended; "
            "a later result appears in `kubectl pacekeeper incidents`"
        )
    new_windows = _poll_until_found(
        lambda: [body for name, body in _list_windows(kubectl, loaded).items() if name not in known_windows],
        WINDOW_WRITE_TIMEOUT_SECONDS,
    )
    if not new_windows:
        print(format_paragraph(f"no rank stands out: {messages[0]}"))
        return 0
    page, title = parse_profile_window(json.dumps(new_windows[0]).encode())
    print(
        "\n".join(
            map(
                format_paragraph,
                (title, *describe_localization(page.localization), f"to do: {page.localization.finding.advice}"),
            )
        )
    )
    if arguments.output and arguments.output != JSON_OUTPUT:
        arguments.output.write_text(render_profile_html(page, title), encoding="utf-8")
    return 0


def show_whatif(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    print(whatif.report_whatif(kubectl, _get_job(kubectl, arguments.job)))
    return 0


def show_links(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    print(links.report_links(kubectl, _get_job(kubectl, arguments.job), all_=arguments.all))
    return 0


def convert_jobs(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    """Print TrainingJobs on standard output, and what became of their sources on standard error."""
    if not arguments.filename and not arguments.target:
        raise InputError("give a file by -f, or KIND/NAME of a job in the cluster, like pytorchjob/bert")
    result = convert.convert_sources(kubectl, arguments.filename, arguments.target, arguments.container)
    print(result.text, file=sys.stderr)
    if arguments.format == "json":
        items = {"apiVersion": "v1", "kind": "List", "items": list(result.jobs)}
        print(json.dumps(result.jobs[0] if len(result.jobs) == 1 else items, indent=2))
    else:
        print("---\n".join(map(kubectl.format_yaml, result.jobs)), end="")
    return 0


def _get_job(kubectl: Kubectl, name: str) -> LoadedJob:
    """Return the job.

    Raises KubectlError that lists the existing jobs.
    """
    try:
        return LoadedJob.from_object(kubectl.get(JOB_RESOURCE, name))
    except KubectlNotFound as error:
        raise KubectlNotFound(f"{error}\n{_describe_existing(kubectl, JOB_RESOURCE)}") from error


def _unfinished_job(kubectl: Kubectl, name: str) -> LoadedJob:
    """Return the job.

    Raises KubectlError if it has ended: changes of its spec have no effect then.
    """
    loaded = _get_job(kubectl, name)
    if loaded.status.phase in jobs.ENDED:
        raise KubectlError(f"{name} is {loaded.status.phase}; next: {jobs.describe_end(loaded)}")
    return loaded


def _get_quarantine(kubectl: Kubectl, node: str) -> LoadedQuarantine:
    try:
        return LoadedQuarantine.from_object(kubectl.get(QUARANTINE_RESOURCE, node))
    except KubectlNotFound as error:
        raise KubectlNotFound(f"{error}\n{_describe_existing(kubectl, QUARANTINE_RESOURCE)}") from error


def _describe_existing(kubectl: Kubectl, kind: str) -> str:
    names = sorted(body["metadata"]["name"] for body in kubectl.list(kind))
    return format_paragraph(f"there are: {', '.join(names)}" if names else f"there are no {kind}")


def _list_incidents(kubectl: Kubectl, loaded: LoadedJob) -> list[LoadedIncident]:
    """Return the Incidents of exactly this job, not of an earlier one of its name."""
    candidates = parse_newest_first(kubectl.list(INCIDENT_RESOURCE, labels=f"{LABEL_JOB}={loaded.job.name}"))
    return [incident for incident in candidates if incident.spec.job_ref.uid == loaded.job.uid]


def _pods_that_do_not_run(kubectl: Kubectl, loaded: LoadedJob) -> list[str]:
    """Describe the pods that do not run, from their events.

    Without permission to read them, a note replaces them.
    """
    if loaded.status.phase is JobPhase.COMPLETE:
        return []
    label = f"{LABEL_JOB}={loaded.job.name}"
    try:
        waiting_pods = pods.choose_waiting_pods(kubectl.list("pods", labels=label, fields=pods.NOT_RUNNING, keep=False))
        descriptions = [
            pods.describe_pod(
                pod, kubectl.list("events", fields=f"involvedObject.uid={pod['metadata']['uid']}"), time.time()
            )
            for pod in waiting_pods
        ]
    except KubectlError as error:
        return [format_paragraph(f"The events of its pods cannot be read: {error}")]
    return [description for description in descriptions if description]


def _list_windows(kubectl: Kubectl, loaded: LoadedJob) -> Mapping[str, Object]:
    windows = kubectl.list(PROFILE_RESOURCE, labels=f"{LABEL_JOB}={loaded.job.name}")
    return {body["metadata"]["name"]: body for body in windows}


def _read_profile_events(kubectl: Kubectl, loaded: LoadedJob) -> Mapping[str, str]:
    """Return the messages of the job's profile events, by UID."""
    events = kubectl.list("events", fields=f"involvedObject.uid={loaded.job.uid},reason=ProfileWindow")
    return {body["metadata"]["uid"]: body.get("message", "") for body in events}


def _poll_until_found(poll: Callable[[], list[Found]], seconds: float) -> list[Found]:
    """Return the first result that is not empty; an empty one if there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (results := poll()) and time.monotonic() < deadline:
        time.sleep(KUBECTL_POLL_INTERVAL_SECONDS)
    return results


def _set_remediation_mode(kubectl: Kubectl, job: str, mode: RemediationMode) -> None:
    _unfinished_job(kubectl, job)
    kubectl.patch(JOB_RESOURCE, job, {"spec": {"remediation": {"mode": mode}}})


def _require_job_name(arguments: argparse.Namespace) -> str:
    if not arguments.job:
        raise InputError("name a job, or --all for the whole cluster")
    name: str = arguments.job
    return name


def _require_yes_for_json(arguments: argparse.Namespace) -> None:
    """Raise InputError if a program would have to confirm."""
    if arguments.output == JSON_OUTPUT and not arguments.yes:
        raise InputError("-o json cannot ask for confirmation: give --yes")


def _confirm_action(description: str, question: str, *, yes: bool) -> bool:
    """Show what will happen, and return whether the user agrees.

    Raises InputError if there is no terminal.
    """
    print(description)
    if yes:
        return True
    if not sys.stdin.isatty():
        raise InputError("there is no terminal to ask for confirmation: give --yes")
    return input(f"{question}? [y/N] ").strip().lower() in {"y", "yes"}


def _build_parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("-n", "--namespace", default="", help="namespace of the job; by default that of the context")
    shared.add_argument("--context", default="", help="context of the kubeconfig")
    shared.add_argument("--kubeconfig", default="")
    shared.set_defaults(all_namespaces=False)
    parser = argparse.ArgumentParser(
        prog="kubectl pacekeeper", description="Show training jobs and the causes of their problems, and act on them."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, run: Callable[[Kubectl, argparse.Namespace], int], purpose: str) -> argparse.ArgumentParser:
        command = verbs.add_parser(name, parents=[shared], help=purpose, description=purpose)
        command.set_defaults(verb=run)
        if run is convert_jobs:
            command.set_defaults(output=None)
            command.add_argument("-o", "--output", dest="format", choices=["yaml", "json"], default="yaml")
        elif run in (write_report, profile_job, show_bill):
            command.add_argument("-o", "--output", type=Path, metavar="PAGE|json", help=PAGE_OPTION_HELP[name])
        else:
            command.add_argument(
                "-o", "--output", type=Path, choices=[JSON_OUTPUT], metavar="json", help="print JSON, for programs"
            )
        return command

    def anywhere(command: argparse.ArgumentParser) -> None:
        command.add_argument("-A", "--all-namespaces", action="store_true")

    def add_operator_namespace(command: argparse.ArgumentParser) -> None:
        command.add_argument("--operator-namespace", default="pacekeeper-system", metavar="NAMESPACE")

    def everywhere(command: argparse.ArgumentParser) -> None:
        command.add_argument("job", nargs="?", default="")
        command.add_argument("--all", action="store_true", help="in the whole cluster, by the ConfigMap that pauses it")
        add_operator_namespace(command)

    command = verb("status", show_status, "show all jobs, or one job in full")
    command.add_argument("job", nargs="?", default="")
    anywhere(command)
    command = verb("why", show_why, "explain why a job is slow or does not train, and what the operator does")
    command.add_argument("job")
    command = verb("incidents", show_incidents, "show Incidents of all jobs or of one, or one Incident in full")
    command.add_argument("name", nargs="?", default="", metavar="JOB|INCIDENT")
    anywhere(command)
    command = verb("watched", show_watched, "show jobs that are only watched, or one in full")
    command.add_argument("name", nargs="?", default="")
    anywhere(command)
    command = verb("injection", switch_injection, "show whether new pods are watched, or switch that on or off")
    command.add_argument("state", nargs="?", choices=["on", "off"])
    add_operator_namespace(command)
    command = verb("bill", show_bill, "show what the GPUs of watched jobs were used for, and lost to")
    anywhere(command)
    command.add_argument("--since", type=_parse_since, default=f"{DEFAULT_BILL_DAYS}d", metavar="DAYSd|DATE")
    command.add_argument("--team", help="of this team only")
    command.add_argument("--team-label", default="", metavar="KEY", help="label of namespaces that names their team")
    command = verb("nodes", show_nodes, "show nodes with Incidents of any jobs within 90 days, or one in full")
    command.add_argument("node", nargs="?", default="")
    command = verb("report", write_report, "write a page about a job: goodput, lost time by cause, Incidents")
    command.add_argument("job")
    command = verb("whatif", show_whatif, "estimate from the last steps how fast a job would be without stragglers")
    command.add_argument("job")
    command = verb("links", show_links, "show a job's delay matrix: how fast each rank sends to others, slowest first")
    command.add_argument("job")
    command.add_argument(
        "--all", action="store_true", help=f"all links, not only the {links.DEFAULT_SHOWN_LINKS} slowest"
    )
    command = verb(
        "profile", profile_job, "find the function that makes a job slow: its ranks profile their next steps"
    )
    command.add_argument("job")
    command.add_argument("--timeout", type=float, default=PROFILE_TIMEOUT_SECONDS, metavar="SECONDS")
    command = verb("convert", convert_jobs, "write a TrainingJob for a PyTorchJob, TrainJob, JobSet, or Indexed Job")
    command.add_argument("target", nargs="?", default="", metavar="KIND/NAME")
    command.add_argument(
        "-f",
        "--filename",
        action="append",
        default=[],
        metavar="FILE",
        help="manifests, also of runtimes; - is standard input",
    )
    command.add_argument("--container", default="", help="the container with the ranks, if it is not found")
    command = verb("mode", set_mode, "set how a job's ranks synchronize their parameters")
    command.add_argument("job")
    command.add_argument("mode", choices=[mode.value for mode in RequestedSyncMode])
    command = verb("restarts", set_restarts, "set how many restarts faults may cost a job within its restartWindow")
    command.add_argument("job")
    command.add_argument("number", type=int, metavar="NUMBER")
    command = verb("pause", pause_remedies, "stop remedies, for a job or in the whole cluster; jobs continue")
    everywhere(command)
    command.add_argument("--reason", default="by kubectl pacekeeper", help="shown to people; with --all")
    everywhere(verb("resume", resume_remedies, "apply remedies again"))
    for name, run, purpose in (
        ("approve", approve_quarantine, "approve a quarantine: its node is cordoned and tainted"),
        ("release", release_node, "end a node's quarantine"),
    ):
        command = verb(name, run, purpose)
        command.add_argument("node")
        command.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    return parser


if __name__ == "__main__":
    sys.exit(main())
