"""The command `kubectl pacekeeper`: its verbs."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pacekeeper_analysis.behaviour.command import parse_profile_window
from pacekeeper_analysis.behaviour.localise import describe_localization
from pacekeeper_analysis.behaviour.report import render_profile_html
from pacekeeper_analysis.errors import InputError

from ..api import ANNOTATION_PROFILE, LABEL_JOB, PAUSE_CONFIG_MAP, JobPhase, RemediationMode, NodeHistory, Object, RequestedSyncMode
from ..runtime import raise_recursion_limit
from . import incidents, jobs, links, nodes, pods, report, whatif
from .kubectl import Kubectl, KubectlError, KubectlNotFound
from .seen import LoadedIncident, LoadedJob, LoadedQuarantine, parse_newest_first
from .text import format_paragraph

Found = TypeVar("Found")

JOB_RESOURCE, INCIDENT_RESOURCE, QUARANTINE_RESOURCE, PROFILE_RESOURCE = "trainingjobs", "incidents", "nodequarantines", "behaviourwindows"
HISTORY_RESOURCE = "nodehistories"
JSON_OUTPUT = Path("json")
"""Value of --output: what is said is one JSON object on standard output."""
PAGE_OPTION_HELP = {
    "report": "where the page is written (JOB.html); json: no page, for programs",
    "profile": "write a page with flame graphs (HTML); json: none, for programs",
}
NODE_RELEASE_TIMEOUT_SECONDS = 120.0
PROFILE_TIMEOUT_SECONDS, KUBECTL_POLL_INTERVAL_SECONDS = 180.0, 2.0
WINDOW_WRITE_TIMEOUT_SECONDS = 15.0
"""A window is kept some seconds after the event that tells of it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, 1 where the cluster or the person says no, 2 for what cannot be done at all."""
    arguments = _build_parser().parse_args(argv)
    if argv is None:  # the process is this command's own; else one job of somebody's keeps all others from being shown
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
    """What the verb says, for programs: its words, and the objects that it has read, whole. Errors are words on
    standard error and the exit status, as without."""
    with contextlib.redirect_stdout(io.StringIO()) as words:
        status = verb(kubectl, arguments)
    objects = sorted(
        kubectl.objects_read.values(),
        key=lambda body: (body.get("kind", ""), body["metadata"].get("namespace", ""), body["metadata"]["name"]),
    )
    print(json.dumps({"text": words.getvalue().rstrip("\n"), "objects": objects}, indent=2))
    return status


def show_status(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    if arguments.job:
        seen = _get_job(kubectl, arguments.job)
        print(jobs.format_status(seen, _list_incidents(kubectl, seen), time.time()))
        return 0
    found = [LoadedJob.from_object(body) for body in kubectl.list(JOB_RESOURCE)]
    print(jobs.format_overview(found, namespaces=kubectl.all_namespaces) if found else "no TrainingJobs here")
    return 0


def show_why(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    seen = _get_job(kubectl, arguments.job)
    print(jobs.explain_job(seen, _list_incidents(kubectl, seen), time.time(), _pods_that_do_not_run(kubectl, seen)))
    return 0


def show_incidents(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    """`name`: of an incident, or of a job (which may be gone)."""
    found = parse_newest_first(kubectl.list(INCIDENT_RESOURCE))
    one = next((incident for incident in found if incident.name == arguments.name), None)
    if one is not None:
        print(incidents.format_incident(one))
        return 0
    if arguments.name:
        found = [incident for incident in found if incident.spec.job_ref.name == arguments.name]
        if not found:
            _get_job(kubectl, arguments.name)
    print(incidents.format_overview(found, time.time(), namespaces=kubectl.all_namespaces) if found else "no Incidents here")
    return 0


def show_nodes(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    if not arguments.node:
        print(nodes.format_overview([NodeHistory.parse(body) for body in kubectl.list(HISTORY_RESOURCE)], time.time()))
        return 0
    try:
        body = kubectl.get(HISTORY_RESOURCE, arguments.node)
    except KubectlNotFound as error:
        raise KubectlNotFound(f"{error}\nIt had no Incidents. {_describe_existing(kubectl, HISTORY_RESOURCE)}") from error
    print(nodes.format_history(NodeHistory.parse(body), time.time()))
    return 0


def write_report(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    seen = _get_job(kubectl, arguments.job)
    text = report.render_page(seen, _list_incidents(kubectl, seen), time.time())
    if arguments.output == JSON_OUTPUT:
        return 0
    output = arguments.output or Path(f"{seen.job.name}.html")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output {output}: {error.strerror}") from error
    print(output)
    return 0


def approve_quarantine(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    _require_yes_for_json(arguments)
    seen = _get_quarantine(kubectl, arguments.node)
    if seen.spec.approved:
        print(f"the quarantine of node {seen.node} is approved already")
        return 0
    if not _confirm_action(nodes.describe_approval(seen), "approve it", yes=arguments.yes):
        return 1
    kubectl.patch(QUARANTINE_RESOURCE, seen.node, {"spec": {"approved": True}})
    print(f"the quarantine of node {seen.node} is approved")
    return 0


def release_node(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    _require_yes_for_json(arguments)
    seen = _get_quarantine(kubectl, arguments.node)
    if not _confirm_action(nodes.describe_release(seen), "release it", yes=arguments.yes):
        return 1
    try:
        kubectl.delete(QUARANTINE_RESOURCE, seen.node, NODE_RELEASE_TIMEOUT_SECONDS)
    except KubectlNotFound:
        pass
    except KubectlError as error:
        raise KubectlError(
            f"{error}\nThe release waits for the operator. While that is away: "
            "python -m pacekeeper_operator release-all (docs/on-call.md)"
        ) from error
    print(f"node {seen.node} is released")
    return 0


def pause_remedies(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    """Remedies, not training."""
    if arguments.all:
        place = (f"--namespace={arguments.operator_namespace}", f"--from-literal=reason={arguments.reason}")
        kubectl.run("create", "configmap", PAUSE_CONFIG_MAP, *place)
        print("remedies are paused in the whole cluster; jobs train on, and what breaks stays down until: ")
        print("kubectl pacekeeper resume --all")
        return 0
    _set_remediation_mode(kubectl, _require_job_name(arguments), RemediationMode.RECOMMEND)
    print(f"remedies for {arguments.job} are recommended only: crashed ranks restart in place, lost pods are replaced,")
    print("and nothing else is done until:")
    print(f"kubectl pacekeeper resume {arguments.job}")
    return 0


def resume_remedies(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    if arguments.all:
        kubectl.run("delete", "configmap", PAUSE_CONFIG_MAP, f"--namespace={arguments.operator_namespace}", "--ignore-not-found")
        print("remedies are taken again, where the jobs allow them")
        return 0
    _set_remediation_mode(kubectl, _require_job_name(arguments), RemediationMode.ACT)
    print(f"remedies for {arguments.job} are taken again, as far as the installation's policy allows")
    return 0


def set_mode(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    _unfinished_job(kubectl, arguments.job)
    kubectl.patch(JOB_RESOURCE, arguments.job, {"spec": {"syncMode": arguments.mode}})
    words = "the operator chooses the mode" if arguments.mode == RequestedSyncMode.AUTO else f"it stays in {arguments.mode}"
    print(f"{arguments.job}: {words}")
    return 0


def set_restarts(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    _unfinished_job(kubectl, arguments.job)
    kubectl.patch(JOB_RESOURCE, arguments.job, {"spec": {"remediation": {"maxRestarts": arguments.number}}})
    print(f"{arguments.job}: faults may start {arguments.number} rounds within its restartWindow; it counts at once")
    return 0


def profile_job(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    """Has the ranks look into what they spend their time on, and waits for what comes of it."""
    seen = _get_job(kubectl, arguments.job)
    if seen.status.phase is not JobPhase.RUNNING:
        raise InputError(f"{seen.job.name} does not train now: kubectl pacekeeper why {seen.job.name}")
    told, kept = _read_profile_events(kubectl, seen), set(_list_windows(kubectl, seen))
    kubectl.annotate(JOB_RESOURCE, seen.job.name, ANNOTATION_PROFILE, f"{time.time():.0f}")
    print("the ranks look into some of their next steps …", file=sys.stderr)
    note = _poll_until_found(
        lambda: [words for uid, words in _read_profile_events(kubectl, seen).items() if uid not in told], arguments.timeout
    )
    if not note:
        raise KubectlError(
            f"no window within {arguments.timeout:.0f} s: its steps take long, or its round has ended; "
            "what comes later stands in `kubectl pacekeeper incidents`"
        )
    new = _poll_until_found(lambda: [body for name, body in _list_windows(kubectl, seen).items() if name not in kept], WINDOW_WRITE_TIMEOUT_SECONDS)
    if not new:
        print(format_paragraph(f"nothing is out of the usual: {note[0]}"))
        return 0
    page, title = parse_profile_window(json.dumps(new[0]).encode())
    print(
        "\n".join(map(format_paragraph, (title, *describe_localization(page.localisation), f"to do: {page.localisation.finding.advice}")))
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


def _get_job(kubectl: Kubectl, name: str) -> LoadedJob:
    """Raises KubectlError that says which there are."""
    try:
        return LoadedJob.from_object(kubectl.get(JOB_RESOURCE, name))
    except KubectlNotFound as error:
        raise KubectlNotFound(f"{error}\n{_describe_existing(kubectl, JOB_RESOURCE)}") from error


def _unfinished_job(kubectl: Kubectl, name: str) -> LoadedJob:
    """Raises KubectlError where it has ended: nothing in its spec counts any more."""
    seen = _get_job(kubectl, name)
    if seen.status.phase in jobs.ENDED:
        raise KubectlError(f"{name} is {seen.status.phase}; what comes next is {jobs.after_end(seen)}")
    return seen


def _get_quarantine(kubectl: Kubectl, node: str) -> LoadedQuarantine:
    try:
        return LoadedQuarantine.from_object(kubectl.get(QUARANTINE_RESOURCE, node))
    except KubectlNotFound as error:
        raise KubectlNotFound(f"{error}\n{_describe_existing(kubectl, QUARANTINE_RESOURCE)}") from error


def _describe_existing(kubectl: Kubectl, kind: str) -> str:
    names = sorted(body["metadata"]["name"] for body in kubectl.list(kind))
    return format_paragraph(f"there are: {', '.join(names)}" if names else f"there are no {kind}")


def _list_incidents(kubectl: Kubectl, seen: LoadedJob) -> list[LoadedIncident]:
    """Of this job, not of an earlier one of its name."""
    found = parse_newest_first(kubectl.list(INCIDENT_RESOURCE, labels=f"{LABEL_JOB}={seen.job.name}"))
    return [incident for incident in found if incident.spec.job_ref.uid == seen.job.uid]


def _pods_that_do_not_run(kubectl: Kubectl, seen: LoadedJob) -> list[str]:
    """Return what the events of the job's pods say. Who may not read them is told all else."""
    if seen.status.phase is JobPhase.COMPLETE:
        return []
    label = f"{LABEL_JOB}={seen.job.name}"
    try:
        found = pods.choose(kubectl.list("pods", labels=label, fields=pods.NOT_RUNNING, keep=False))
        told = [
            pods.describe(
                pod, kubectl.list("events", fields=f"involvedObject.uid={pod['metadata']['uid']}"), time.time()
            )
            for pod in found
        ]
    except KubectlError as error:
        return [format_paragraph(f"What the events of its pods say is not known: {error}")]
    return [words for words in told if words]


def _list_windows(kubectl: Kubectl, seen: LoadedJob) -> Mapping[str, Object]:
    found = kubectl.list(PROFILE_RESOURCE, labels=f"{LABEL_JOB}={seen.job.name}")
    return {body["metadata"]["name"]: body for body in found}


def _read_profile_events(kubectl: Kubectl, seen: LoadedJob) -> Mapping[str, str]:
    """What events say of the job's behaviour windows, by UID."""
    found = kubectl.list("events", fields=f"involvedObject.uid={seen.job.uid},reason=BehaviourWindow")
    return {body["metadata"]["uid"]: body.get("message", "") for body in found}


def _poll_until_found(poll: Callable[[], list[Found]], seconds: float) -> list[Found]:
    """The first answer that is not empty; empty where there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := poll()) and time.monotonic() < deadline:
        time.sleep(KUBECTL_POLL_INTERVAL_SECONDS)
    return found


def _set_remediation_mode(kubectl: Kubectl, job: str, mode: RemediationMode) -> None:
    _unfinished_job(kubectl, job)
    kubectl.patch(JOB_RESOURCE, job, {"spec": {"remediation": {"mode": mode}}})


def _require_job_name(arguments: argparse.Namespace) -> str:
    if not arguments.job:
        raise InputError("name a job, or --all for the whole cluster")
    name: str = arguments.job
    return name


def _require_yes_for_json(arguments: argparse.Namespace) -> None:
    """Raises InputError where a program would be asked."""
    if arguments.output == JSON_OUTPUT and not arguments.yes:
        raise InputError("-o json asks nobody: give --yes")


def _confirm_action(what: str, question: str, *, yes: bool) -> bool:
    """Whether the person agrees to what is shown. Raises InputError where there is nobody to ask."""
    print(what)
    if yes:
        return True
    if not sys.stdin.isatty():
        raise InputError("nobody can be asked here: give --yes")
    return input(f"{question}? [y/N] ").strip().lower() in {"y", "yes"}


def _build_parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("-n", "--namespace", default="", help="of the job; by default that of the context")
    shared.add_argument("--context", default="", help="of the kubeconfig")
    shared.add_argument("--kubeconfig", default="")
    shared.set_defaults(all_namespaces=False)
    parser = argparse.ArgumentParser(
        prog="kubectl pacekeeper", description="How training jobs are, why, and what a person on call does about it."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, run: Callable[[Kubectl, argparse.Namespace], int], purpose: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, parents=[shared], help=purpose, description=purpose)
        made.set_defaults(verb=run)
        if run in (write_report, profile_job):
            made.add_argument("-o", "--output", type=Path, metavar="PAGE|json", help=PAGE_OPTION_HELP[name])
        else:
            made.add_argument("-o", "--output", type=Path, choices=[JSON_OUTPUT], metavar="json", help="for programs")
        return made

    def anywhere(made: argparse.ArgumentParser) -> None:
        made.add_argument("-A", "--all-namespaces", action="store_true")

    def everywhere(made: argparse.ArgumentParser) -> None:
        made.add_argument("job", nargs="?", default="")
        made.add_argument("--all", action="store_true", help="in the whole cluster, by the ConfigMap that pauses it")
        made.add_argument("--operator-namespace", default="pacekeeper-system", metavar="NAMESPACE")

    made = verb("status", show_status, "how jobs are, or one job in full")
    made.add_argument("job", nargs="?", default="")
    anywhere(made)
    made = verb("why", show_why, "why a job is slow or does not train, and what is done about it")
    made.add_argument("job")
    made = verb("incidents", show_incidents, "faults, of all jobs or of one; one in full by its name")
    made.add_argument("name", nargs="?", default="", metavar="JOB|INCIDENT")
    anywhere(made)
    made = verb("nodes", show_nodes, "which nodes had Incidents within 90 days, over all jobs; one in full by its name")
    made.add_argument("node", nargs="?", default="")
    made = verb("report", write_report, "a page of a job's life: goodput, what its time was lost to, its incidents")
    made.add_argument("job")
    made = verb("whatif", show_whatif, "how fast a job would be without its stragglers, by its last steps")
    made.add_argument("job")
    made = verb("links", show_links, "who sends to whom, and how fast: a job's delay matrix, the slowest link first")
    made.add_argument("job")
    made.add_argument("--all", action="store_true", help=f"links, not only the {links.DEFAULT_SHOWN_LINKS} slowest")
    made = verb("profile", profile_job, "which function makes a job slow: its ranks look into their next steps")
    made.add_argument("job")
    made.add_argument("--timeout", type=float, default=PROFILE_TIMEOUT_SECONDS, metavar="SECONDS")
    made = verb("mode", set_mode, "how a job's ranks keep their parameters alike")
    made.add_argument("job")
    made.add_argument("mode", choices=[mode.value for mode in RequestedSyncMode])
    made = verb("restarts", set_restarts, "how many restarts faults may cost a job within its restartWindow")
    made.add_argument("job")
    made.add_argument("number", type=int, metavar="NUMBER")
    made = verb("pause", pause_remedies, "take no remedies, for a job or in the whole cluster; jobs train on")
    everywhere(made)
    made.add_argument("--reason", default="by kubectl pacekeeper", help="for people, with --all")
    everywhere(verb("resume", resume_remedies, "take them again"))
    for name, run, purpose in (
        ("approve", approve_quarantine, "a quarantine that waits for a person: the node is cordoned and tainted"),
        ("release", release_node, "end a node's quarantine"),
    ):
        made = verb(name, run, purpose)
        made.add_argument("node")
        made.add_argument("--yes", action="store_true", help="do not ask")
    return parser


if __name__ == "__main__":
    sys.exit(main())
