"""Claims: a published number, the measured number, and whether the claim is met; tables of claims."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfedrl.experiments.stats import Interval, mean_interval, mean_share_interval, median_interval, share_interval
from perfedrl.experiments.store import Run
from perfedrl.report import page
from perfedrl.report.tables import number, seed_counts, span
from perfedrl.report.terminal_table import TerminalTable

HEADER = ("", "claim", "paper", "measured", "95 % interval", "met")


@dataclass(frozen=True)
class Claim:
    """A published number and the measured one with its 95 % interval over seeds.

    `experiment` is the name of the study; the fields are the keys of claims.json.
    """

    experiment: str
    claim: str
    paper: float
    measured: float
    low: float
    high: float
    met: bool


def near(study: str, claim: str, paper: float, values: np.ndarray, tolerance: float, *, shares: bool = False) -> Claim:
    """A claim that is met when the mean over seeds lies within the tolerance of the paper's number.

    `shares` says that the values are shares, whose interval stays within 0 and 1.
    """
    measured = mean_share_interval(values) if shares else mean_interval(values)
    return Claim(study, claim, paper, *measured, met=bool(abs(measured.mean - paper) <= tolerance))


def median(study: str, claim: str, paper: float, values: np.ndarray, low: float, high: float) -> Claim:
    """A claim that is met when the median over seeds lies in [low, high]."""
    measured = median_interval(values)
    return Claim(study, claim, paper, *measured, met=bool(low <= measured.mean <= high))


def fraction(study: str, claim: str, paper: float, holds: np.ndarray, low: float, high: float) -> Claim:
    """A claim that is met when the fraction of seeds for which something holds lies in [low, high]."""
    measured = share_interval(int(np.sum(holds)), len(holds))
    return Claim(study, claim, paper, *measured, met=bool(low <= measured.mean <= high))


def everywhere(study: str, claim: str, holds: np.ndarray) -> Claim:
    """A claim that something holds in all cases; the measured number is the share of cases in which it does."""
    measured = float(np.mean(holds))
    return Claim(study, claim, 1.0, measured, measured, measured, met=measured == 1.0)


def single(study: str, claim: str, paper: float, measured: Interval, low: float, high: float) -> Claim:
    """A claim about one number, which is met when the number lies in [low, high]."""
    return Claim(study, claim, paper, *measured, met=bool(low <= measured.mean <= high))


def point(value: float | np.floating) -> Interval:
    """A number without spread, as an interval."""
    return Interval(*3 * [float(value)])


def cells(claim: Claim) -> tuple[str, ...]:
    """A claim as a row of text."""
    paper = "–" if np.isnan(claim.paper) else f"{claim.paper:g}"
    measured = number(claim.measured), span(claim.low, claim.high)
    return claim.experiment, claim.claim, paper, *measured, "yes" if claim.met else "no"


def terminal_table(claims: Sequence[Claim], runs: Sequence[Run]) -> TerminalTable:
    """Claims as a table for the terminal, with the number of seeds of the runs behind them, if there are any."""
    caption = f"{sum(claim.met for claim in claims)} of {len(claims)} claims met"
    table = TerminalTable(*HEADER, title=seed_counts(runs) if runs else None, caption=caption)
    for claim in claims:
        *row, met = cells(claim)
        table.add_row(*row, met if claim.met else f"[red]{met}[/]")
    return table


def page_table(claims: Sequence[Claim]) -> page.PageTable:
    """Claims as a table of the report page; claims that are not met are marked."""
    met = sum(claim.met for claim in claims)
    return page.PageTable(
        "Claims",
        HEADER,
        [cells(claim) for claim in claims],
        note=f"{met} of {len(claims)} met.",
        mark=["" if claim.met else "missed" for claim in claims],
    )
