"""The bill of watched jobs, as text and as an HTML page: what their GPUs were used for. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from pacekeeper_analysis.accounting.bill import Bill, JobAccount, PredictionRecord, sum_bill
from pacekeeper_analysis.accounting.gpu_account import Loss, Tally

from ..api.incident import IncidentOutcome, compute_saved_seconds
from .html_page import format_moment, render_document, render_section, render_table
from .loaded_objects import LoadedIncident, LoadedWatchedJob
from .text import format_elapsed, format_table

MAX_NODES_SHOWN = 20
MAX_INTERVALS_SHOWN = 200
"""Upper limit of the page's list of incidents, longest first."""
JOB_HEADERS = ("namespace", "job", "team", "GPU hours", "goodput", *(loss.value for loss in Loss))


def build_bill(
    jobs: Sequence[LoadedWatchedJob],
    incidents: Sequence[LoadedIncident],
    since: str,
    teams: Mapping[str, str],
    team: str | None = None,
) -> Bill:
    """Sum the days from `since` (ISO date, UTC) on.

    `incidents`: of the same namespaces, those of TrainingJobs for how good predictions are. `teams`: of each namespace,
    instead of the team that a job has recorded. Without either, the namespace is the team. `team` None: all.
    """
    saved_by_job: dict[str | None, float] = defaultdict(float)
    for incident in incidents:
        if format_moment(incident.started_at) >= since:  # both begin with the date
            saved_by_job[incident.spec.job_ref.uid] += get_saved_seconds(incident)
    accounts = []
    for job in jobs:
        if job.status.account is None:
            continue
        account = job.status.account.to_account()
        accounts.append(
            JobAccount(
                job.namespace,
                job.spec.root.kind,
                job.spec.root.name,
                teams.get(job.namespace) or job.spec.team or job.namespace,
                account.days,
                account.nodes,
                saved_by_job[job.uid] * account.gpus,
            )
        )
    predictions = [
        (incident.status.predicted_gain, incident.status.measured_gain)
        for incident in incidents
        if incident.status.predicted_gain is not None and incident.status.measured_gain is not None
    ]
    return sum_bill(accounts, since, predictions, team)


def get_saved_seconds(incident: LoadedIncident) -> float:
    """Return the seconds of training that the remedy would have kept, by its price; 0: none was worth it."""
    if incident.status.outcome is not IncidentOutcome.OBSERVED:
        return 0.0
    return compute_saved_seconds(incident.status.considered, incident.status.recovered_seconds)


def format_bill(bill: Bill) -> str:
    """Format the bill as text."""
    if not bill.lines:
        return f"no watched job has held GPUs since {bill.since}"
    parts = [
        _summarize_bill(bill),
        format_table(["CAUSE", "GPU HOURS", "SHARE"], _list_causes(bill.total)),
        format_table(
            ["NAMESPACE", "JOB", "TEAM", "GPU HOURS", "GOODPUT", "MOST LOST TO"],
            [
                [
                    *_list_job_cells(line.job, line.tally),
                    max(line.tally.lost, key=lambda loss: line.tally.lost[loss], default=""),
                ]
                for line in bill.lines
            ],
        ),
    ]
    if bill.nodes:
        nodes = [(node, f"{seconds / 3600:.2f}") for node, seconds in bill.nodes[:MAX_NODES_SHOWN]]
        parts.append(format_table(["NODE", "GPU HOURS LOST BY ITS RANKS"], nodes))
    parts.append(describe_predictions(bill.predictions))
    return "\n\n".join(parts)


def render_bill_page(
    bill: Bill, jobs: Sequence[LoadedWatchedJob], incidents: Sequence[LoadedIncident], now: float
) -> str:
    """Render the bill as a page, with the incidents of its jobs. `now` ends those that are open."""
    by_uid = {job.uid: job for job in jobs}
    observed = [(incident, by_uid[uid]) for incident in incidents if (uid := incident.spec.job_ref.uid or "") in by_uid]
    teams = [(team or "–", *_list_tally_cells(tally)) for team, tally in bill.teams.items()]
    lines = [(*_list_job_cells(line.job, line.tally), *_list_losses(line.tally)) for line in bill.lines]
    sections = (
        render_section("", f"<p>{_summarize_bill(bill)}</p>"),
        render_section("By cause", render_table(("cause", "GPU hours", "share"), _list_causes(bill.total))),
        render_section(
            "By team", render_table(("team", "GPU hours", "goodput", *(loss.value for loss in Loss)), teams)
        ),
        render_section("By job", render_table(JOB_HEADERS, lines)),
        render_section(
            "By node of the rank that caused it",
            render_table(
                ("node", "GPU hours lost to hangs and slow ranks"),
                [(node, f"{seconds / 3600:.2f}") for node, seconds in bill.nodes],
            ),
        ),
        render_section("Incidents, longest first", render_table(*_build_intervals(observed, now))),
        render_section("How good the predictions are", f"<p>{describe_predictions(bill.predictions)}</p>"),
    )
    return render_document("GPU bill of watched jobs", f"since {bill.since}", "".join(sections))


def describe_predictions(record: PredictionRecord) -> str:
    """Return a sentence about how predicted gains compare with measured ones."""
    if record.median is None:
        return (
            "What acting would have kept is priced as for TrainingJobs. No remedy of a TrainingJob here has a measured "
            "gain yet, so it is not known how good these prices are."
        )
    spread = (
        ""
        if record.quartiles is None
        else f", half of them from {record.quartiles[0]:.2f} to {record.quartiles[1]:.2f}"
    )
    return (
        "What acting would have kept is priced as for TrainingJobs. There, predicted over measured gain of "
        f"{record.count} remedies was {record.median:.2f} in the median{spread}."
    )


def _summarize_bill(bill: Bill) -> str:
    total = bill.total
    goodput = 0.0 if total.goodput is None else total.goodput
    return (
        f"Since {bill.since}, {len(bill.lines)} jobs held GPUs for {total.held / 3600:.1f} hours. {goodput:.1%} were "
        f"useful. Acting would have kept about {bill.saved / 3600:.1f} GPU hours."
    )


def _list_causes(tally: Tally) -> list[tuple[str, str, str]]:
    parts = [("useful", tally.useful), *sorted(tally.lost.items(), key=lambda item: -item[1])]
    return [(str(name), f"{seconds / 3600:.2f}", f"{seconds / (tally.held or 1):.1%}") for name, seconds in parts]


def _list_job_cells(job: JobAccount, tally: Tally) -> tuple[str, ...]:
    return (job.namespace, f"{job.kind} {job.name}", job.team, *_list_hours(tally))


def _list_tally_cells(tally: Tally) -> tuple[str, ...]:
    return (*_list_hours(tally), *_list_losses(tally))


def _list_hours(tally: Tally) -> tuple[str, str]:
    return f"{tally.held / 3600:.2f}", "" if tally.goodput is None else f"{tally.goodput:.1%}"


def _list_losses(tally: Tally) -> Iterator[str]:
    return (f"{tally.lost.get(loss, 0.0) / 3600:.2f}" for loss in Loss)


def _build_intervals(
    observed: Sequence[tuple[LoadedIncident, LoadedWatchedJob]], now: float
) -> tuple[Sequence[str], list[Sequence[str]]]:
    timed = [
        (incident.status.recovered_seconds or max(0.0, now - incident.started_at), incident, job)
        for incident, job in observed
        if incident.status.recovered_seconds is not None or incident.is_open
    ]
    timed.sort(key=lambda item: -item[0])
    rows = [
        (
            format_moment(incident.started_at),
            format_elapsed(seconds),
            job.root,
            incident.spec.cause,
            incident.spec.node or "",
            incident.spec.message,
            format_elapsed(saved) if (saved := get_saved_seconds(incident)) else "",
        )
        for seconds, incident, job in timed[:MAX_INTERVALS_SHOWN]
    ]
    return ("began", "lasted", "job", "cause", "node", "what", "acting would have kept"), list(rows)
