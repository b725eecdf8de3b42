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

from pacekeeper_analysis.behaviour.command import load
from pacekeeper_analysis.behaviour.localise import sentences
from pacekeeper_analysis.behaviour.report import html
from pacekeeper_analysis.errors import InputError

from ..api import ANNOTATION_PROFILE, LABEL_JOB, PAUSE, JobPhase, Mode, NodeHistory, Object, WantedMode
from ..runtime import read_what_is_nested_deeply
from . import incidents, jobs, links, nodes, pods, report, whatif
from .kubectl import Kubectl, KubectlError, Missing
from .seen import SeenIncident, SeenJob, SeenQuarantine, newest_first
from .text import paragraph

Found = TypeVar("Found")

JOBS, INCIDENTS, QUARANTINES, BEHAVIOURS = "trainingjobs", "incidents", "nodequarantines", "behaviourwindows"
HISTORIES = "nodehistories"
JSON = Path("json")
"""Value of --output: what is said is one JSON object on standard output."""
PAGES = {
    "report": "where the page is written (JOB.html); json: no page, for programs",
    "profile": "write a page with flame graphs (HTML); json: none, for programs",
}
RELEASE_SECONDS = 120.0
PROFILE_SECONDS, LOOK_SECONDS = 180.0, 2.0
KEPT_SECONDS = 15.0
"""A window is kept some seconds after the event that tells of it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, 1 where the cluster or the person says no, 2 for what cannot be done at all."""
    arguments = _parser().parse_args(argv)
    if argv is None:  # the process is this command's own; else one job of somebody's keeps all others from being shown
        read_what_is_nested_deeply()
    options = tuple(f"--{name}={value}" for name in ("context", "kubeconfig") if (value := getattr(arguments, name)))
    kubectl = Kubectl(options, arguments.namespace, arguments.all_namespaces)
    try:
        verb: Callable[[Kubectl, argparse.Namespace], int] = arguments.verb
        return _as_json(verb, kubectl, arguments) if arguments.output == JSON else verb(kubectl, arguments)
    except InputError as error:
        print(f"kubectl pacekeeper: {error}", file=sys.stderr)
        return 1 if isinstance(error, KubectlError) else 2
    except KeyboardInterrupt:
        return 130


def _as_json(
    verb: Callable[[Kubectl, argparse.Namespace], int], kubectl: Kubectl, arguments: argparse.Namespace
) -> int:
    """What the verb says, for programs: its words, and the objects that it has read, whole. Errors are words on
    standard error and the exit status, as without."""
    with contextlib.redirect_stdout(io.StringIO()) as words:
        status = verb(kubectl, arguments)
    objects = sorted(
        kubectl.seen.values(),
        key=lambda body: (body.get("kind", ""), body["metadata"].get("namespace", ""), body["metadata"]["name"]),
    )
    print(json.dumps({"text": words.getvalue().rstrip("\n"), "objects": objects}, indent=2))
    return status


def show_status(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    if arguments.job:
        seen = _job(kubectl, arguments.job)
        print(jobs.status(seen, _incidents(kubectl, seen), time.time()))
        return 0
    found = [SeenJob.of(body) for body in kubectl.list(JOBS)]
    print(jobs.overview(found, namespaces=kubectl.all_namespaces) if found else "no TrainingJobs here")
    return 0


def tell_why(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    seen = _job(kubectl, arguments.job)
    print(jobs.why(seen, _incidents(kubectl, seen), time.time(), _pods_that_do_not_run(kubectl, seen)))
    return 0


def show_incidents(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    """`name`: of an incident, or of a job (which may be gone)."""
    found = newest_first(kubectl.list(INCIDENTS))
    one = next((incident for incident in found if incident.name == arguments.name), None)
    if one is not None:
        print(incidents.story(one))
        return 0
    if arguments.name:
        found = [incident for incident in found if incident.spec.job_ref.name == arguments.name]
        if not found:
            _job(kubectl, arguments.name)
    print(incidents.overview(found, time.time(), namespaces=kubectl.all_namespaces) if found else "no Incidents here")
    return 0


def show_nodes(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    if not arguments.node:
        print(nodes.overview([NodeHistory.parse(body) for body in kubectl.list(HISTORIES)], time.time()))
        return 0
    try:
        body = kubectl.get(HISTORIES, arguments.node)
    except Missing as error:
        raise Missing(f"{error}\nIt had no Incidents. {_there_are(kubectl, HISTORIES)}") from error
    print(nodes.story(NodeHistory.parse(body), time.time()))
    return 0


def write_report(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    seen = _job(kubectl, arguments.job)
    text = report.page(seen, _incidents(kubectl, seen), time.time())
    if arguments.output == JSON:
        return 0
    output = arguments.output or Path(f"{seen.job.name}.html")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output {output}: {error.strerror}") from error
    print(output)
    return 0


def approve(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    _needs_no_answer(arguments)
    seen = _quarantine(kubectl, arguments.node)
    if seen.spec.approved:
        print(f"the quarantine of node {seen.node} is approved already")
        return 0
    if not _confirmed(nodes.approval(seen), "approve it", yes=arguments.yes):
        return 1
    kubectl.patch(QUARANTINES, seen.node, {"spec": {"approved": True}})
    print(f"the quarantine of node {seen.node} is approved")
    return 0


def release(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    _needs_no_answer(arguments)
    seen = _quarantine(kubectl, arguments.node)
    if not _confirmed(nodes.release(seen), "release it", yes=arguments.yes):
        return 1
    try:
        kubectl.delete(QUARANTINES, seen.node, RELEASE_SECONDS)
    except Missing:
        pass
    except KubectlError as error:
        raise KubectlError(
            f"{error}\nThe release waits for the operator. While that is away: "
            "python -m pacekeeper_operator release-all (docs/on-call.md)"
        ) from error
    print(f"node {seen.node} is released")
    return 0


def pause(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    """Remedies, not training."""
    if arguments.all:
        place = (f"--namespace={arguments.operator_namespace}", f"--from-literal=reason={arguments.reason}")
        kubectl.run("create", "configmap", PAUSE, *place)
        print("remedies are paused in the whole cluster; jobs train on, and what breaks stays down until: ")
        print("kubectl pacekeeper resume --all")
        return 0
    _set_mode_of_remedies(kubectl, _named(arguments), Mode.RECOMMEND)
    print(f"remedies for {arguments.job} are recommended only: crashed ranks restart in place, lost pods are replaced,")
    print("and nothing else is done until:")
    print(f"kubectl pacekeeper resume {arguments.job}")
    return 0


def resume(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    if arguments.all:
        kubectl.run("delete", "configmap", PAUSE, f"--namespace={arguments.operator_namespace}", "--ignore-not-found")
        print("remedies are taken again, where the jobs allow them")
        return 0
    _set_mode_of_remedies(kubectl, _named(arguments), Mode.ACT)
    print(f"remedies for {arguments.job} are taken again, as far as the installation's policy allows")
    return 0


def set_mode(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    _unfinished_job(kubectl, arguments.job)
    kubectl.patch(JOBS, arguments.job, {"spec": {"syncMode": arguments.mode}})
    words = "the operator chooses the mode" if arguments.mode == WantedMode.AUTO else f"it stays in {arguments.mode}"
    print(f"{arguments.job}: {words}")
    return 0


def set_restarts(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    _unfinished_job(kubectl, arguments.job)
    kubectl.patch(JOBS, arguments.job, {"spec": {"remediation": {"maxRestarts": arguments.number}}})
    print(f"{arguments.job}: faults may start {arguments.number} rounds within its restartWindow; it counts at once")
    return 0


def profile(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    """Has the ranks look into what they spend their time on, and waits for what comes of it."""
    seen = _job(kubectl, arguments.job)
    if seen.status.phase is not JobPhase.RUNNING:
        raise InputError(f"{seen.job.name} does not train now: kubectl pacekeeper why {seen.job.name}")
    told, kept = _told(kubectl, seen), set(_windows(kubectl, seen))
    kubectl.annotate(JOBS, seen.job.name, ANNOTATION_PROFILE, f"{time.time():.0f}")
    print("the ranks look into some of their next steps …", file=sys.stderr)
    note = _awaited(
        lambda: [words for uid, words in _told(kubectl, seen).items() if uid not in told], arguments.timeout
    )
    if not note:
        raise KubectlError(
            f"no window within {arguments.timeout:.0f} s: its steps take long, or its round has ended; "
            "what comes later stands in `kubectl pacekeeper incidents`"
        )
    new = _awaited(lambda: [body for name, body in _windows(kubectl, seen).items() if name not in kept], KEPT_SECONDS)
    if not new:
        print(paragraph(f"nothing is out of the usual: {note[0]}"))
        return 0
    page, title = load(json.dumps(new[0]).encode())
    print(
        "\n".join(map(paragraph, (title, *sentences(page.localisation), f"to do: {page.localisation.finding.advice}")))
    )
    if arguments.output and arguments.output != JSON:
        arguments.output.write_text(html(page, title), encoding="utf-8")
    return 0


def tell_whatif(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    print(whatif.told(kubectl, _job(kubectl, arguments.job)))
    return 0


def show_links(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    print(links.told(kubectl, _job(kubectl, arguments.job), all_=arguments.all))
    return 0


def _job(kubectl: Kubectl, name: str) -> SeenJob:
    """Raises KubectlError that says which there are."""
    try:
        return SeenJob.of(kubectl.get(JOBS, name))
    except Missing as error:
        raise Missing(f"{error}\n{_there_are(kubectl, JOBS)}") from error


def _unfinished_job(kubectl: Kubectl, name: str) -> SeenJob:
    """Raises KubectlError where it has ended: nothing in its spec counts any more."""
    seen = _job(kubectl, name)
    if seen.status.phase in jobs.ENDED:
        raise KubectlError(f"{name} is {seen.status.phase}; what comes next is {jobs.after_end(seen)}")
    return seen


def _quarantine(kubectl: Kubectl, node: str) -> SeenQuarantine:
    try:
        return SeenQuarantine.of(kubectl.get(QUARANTINES, node))
    except Missing as error:
        raise Missing(f"{error}\n{_there_are(kubectl, QUARANTINES)}") from error


def _there_are(kubectl: Kubectl, kind: str) -> str:
    names = sorted(body["metadata"]["name"] for body in kubectl.list(kind))
    return paragraph(f"there are: {', '.join(names)}" if names else f"there are no {kind}")


def _incidents(kubectl: Kubectl, seen: SeenJob) -> list[SeenIncident]:
    """Of this job, not of an earlier one of its name."""
    found = newest_first(kubectl.list(INCIDENTS, labels=f"{LABEL_JOB}={seen.job.name}"))
    return [incident for incident in found if incident.spec.job_ref.uid == seen.job.uid]


def _pods_that_do_not_run(kubectl: Kubectl, seen: SeenJob) -> list[str]:
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
        return [paragraph(f"What the events of its pods say is not known: {error}")]
    return [words for words in told if words]


def _windows(kubectl: Kubectl, seen: SeenJob) -> Mapping[str, Object]:
    found = kubectl.list(BEHAVIOURS, labels=f"{LABEL_JOB}={seen.job.name}")
    return {body["metadata"]["name"]: body for body in found}


def _told(kubectl: Kubectl, seen: SeenJob) -> Mapping[str, str]:
    """What events say of the job's behaviour windows, by UID."""
    found = kubectl.list("events", fields=f"involvedObject.uid={seen.job.uid},reason=BehaviourWindow")
    return {body["metadata"]["uid"]: body.get("message", "") for body in found}


def _awaited(look: Callable[[], list[Found]], seconds: float) -> list[Found]:
    """The first answer that is not empty; empty where there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return found


def _set_mode_of_remedies(kubectl: Kubectl, job: str, mode: Mode) -> None:
    _unfinished_job(kubectl, job)
    kubectl.patch(JOBS, job, {"spec": {"remediation": {"mode": mode}}})


def _named(arguments: argparse.Namespace) -> str:
    if not arguments.job:
        raise InputError("name a job, or --all for the whole cluster")
    name: str = arguments.job
    return name


def _needs_no_answer(arguments: argparse.Namespace) -> None:
    """Raises InputError where a program would be asked."""
    if arguments.output == JSON and not arguments.yes:
        raise InputError("-o json asks nobody: give --yes")


def _confirmed(what: str, question: str, *, yes: bool) -> bool:
    """Whether the person agrees to what is shown. Raises InputError where there is nobody to ask."""
    print(what)
    if yes:
        return True
    if not sys.stdin.isatty():
        raise InputError("nobody can be asked here: give --yes")
    return input(f"{question}? [y/N] ").strip().lower() in {"y", "yes"}


def _parser() -> argparse.ArgumentParser:
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
        if run in (write_report, profile):
            made.add_argument("-o", "--output", type=Path, metavar="PAGE|json", help=PAGES[name])
        else:
            made.add_argument("-o", "--output", type=Path, choices=[JSON], metavar="json", help="for programs")
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
    made = verb("why", tell_why, "why a job is slow or does not train, and what is done about it")
    made.add_argument("job")
    made = verb("incidents", show_incidents, "faults, of all jobs or of one; one in full by its name")
    made.add_argument("name", nargs="?", default="", metavar="JOB|INCIDENT")
    anywhere(made)
    made = verb("nodes", show_nodes, "which nodes had Incidents within 90 days, over all jobs; one in full by its name")
    made.add_argument("node", nargs="?", default="")
    made = verb("report", write_report, "a page of a job's life: goodput, what its time was lost to, its incidents")
    made.add_argument("job")
    made = verb("whatif", tell_whatif, "how fast a job would be without its stragglers, by its last steps")
    made.add_argument("job")
    made = verb("links", show_links, "who sends to whom, and how fast: a job's delay matrix, the slowest link first")
    made.add_argument("job")
    made.add_argument("--all", action="store_true", help=f"links, not only the {links.SHOWN} slowest")
    made = verb("profile", profile, "which function makes a job slow: its ranks look into their next steps")
    made.add_argument("job")
    made.add_argument("--timeout", type=float, default=PROFILE_SECONDS, metavar="SECONDS")
    made = verb("mode", set_mode, "how a job's ranks keep their parameters alike")
    made.add_argument("job")
    made.add_argument("mode", choices=[mode.value for mode in WantedMode])
    made = verb("restarts", set_restarts, "how many restarts faults may cost a job within its restartWindow")
    made.add_argument("job")
    made.add_argument("number", type=int, metavar="NUMBER")
    made = verb("pause", pause, "take no remedies, for a job or in the whole cluster; jobs train on")
    everywhere(made)
    made.add_argument("--reason", default="by kubectl pacekeeper", help="for people, with --all")
    everywhere(verb("resume", resume, "take them again"))
    for name, run, purpose in (
        ("approve", approve, "a quarantine that waits for a person: the node is cordoned and tainted"),
        ("release", release, "end a node's quarantine"),
    ):
        made = verb(name, run, purpose)
        made.add_argument("node")
        made.add_argument("--yes", action="store_true", help="do not ask")
    return parser


if __name__ == "__main__":
    sys.exit(main())
