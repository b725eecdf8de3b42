"""The policy: which remedies the operator may apply to a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..api.training_job import ExitCodesSpec, RemediationMode, Remedy


@dataclass(frozen=True)
class Policy:
    """What the operator may do: the job's spec under the platform's caps."""

    mode: RemediationMode
    allow: frozenset[Remedy]
    max_restarts: int
    restart_window: float
    rounds_without_progress: int = 3  # rounds that may end at the same step; 0: without limit
    exit_codes: ExitCodesSpec = field(default_factory=ExitCodesSpec)
    paused: str = ""  # why remedies are paused in the whole cluster; "": they are not
    grace_after_start: float = 10.0
    applies_network_policy: bool = True  # each job gets a NetworkPolicy
    link_probes_per_hour: int = 2  # limit of one job; 0: launchers never measure their links
    profiles_per_hour: int = 2  # profile windows of one job; 0: only on a user's request
    observes_links: bool = False  # of a watched job: its sidecars sample the ranks' connections
    observes_profiles: bool = False  # of a watched job: its ranks are asked for profile windows
    observes_only: bool = False  # the job is only watched: no remedy is ever applied

    @property
    def applies_remedies(self) -> bool:
        return self.mode is RemediationMode.ACT and not self.paused and not self.observes_only

    @property
    def applies_routine_remedies(self) -> bool:
        """Whether routine remedies are applied, even where all others are only recommended.

        Crashed ranks restart in place, and lost workers are replaced, as `batch/v1` and torchrun would do.
        """
        return not self.paused and not self.observes_only

    @property
    def restraint_reason(self) -> str:
        """Why a remedy that is not routine is not applied; "": it is applied."""
        if self.observes_only:
            return "the job is only watched"
        return "" if self.applies_remedies else "remedies are only recommended"

    def find_refusal(self, remedy: Remedy) -> str:
        """Return why the remedy may not be applied; "": it may."""
        return "" if remedy in self.allow else "spec.remediation.allow does not list it"
