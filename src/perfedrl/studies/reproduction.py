"""Reproduce studies: choose them by name, collect configs, check claims, draw figures, write a page."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from perfedrl.errors import UserError, nearest
from perfedrl.experiments.config import Config
from perfedrl.experiments.store import Run
from perfedrl.report import page
from perfedrl.report.plots import Plot
from perfedrl.report.run_page import provenance_facts
from perfedrl.report.tables import seed_counts
from perfedrl.studies import GROUPS, STUDIES
from perfedrl.studies.base import Study
from perfedrl.studies.claims import Claim, page_table
from perfedrl.studies.measurement_cache import MeasurementCache

QUICK_SEEDS = 4


def choose(names: Iterable[str], tell: Callable[[str], None]) -> list[Study]:
    """Return the studies that names of studies and groups stand for, once each.

    A study that was named itself must be able to run here. A group leaves out those whose optional package is missing,
    and `tell` is called with one sentence for each of them.
    """
    names = list(names)
    for name in names:
        if name in STUDIES:
            STUDIES[name].check_installed()
        elif name not in GROUPS:
            raise UserError(f"unknown study {name!r}{nearest(name, [*STUDIES, *GROUPS])}")
    members = [STUDIES[one] for name in names for one in GROUPS.get(name, [name])]
    chosen = []
    for study in {study.name: study for study in members}.values():
        if study.missing:
            tell(f"left out: {study.missing}")
        else:
            chosen.append(study)
    if not chosen:
        raise UserError("none of these studies can run here")
    return chosen


def seeds_of(study: Study, seeds: int | None = None, quick: bool = False) -> int:
    """The number of seeds to run a study with: the given one, or the study's own."""
    return seeds or (QUICK_SEEDS if quick else study.seeds)


def all_configs(studies: Iterable[Study], seeds: int | None = None, quick: bool = False) -> list[Config]:
    """The configs of some studies, each distinct one once."""
    made = (config for study in studies for config in study.configs(seeds_of(study, seeds, quick), quick).values())
    return list({config.folder: config for config in made}.values())


def claims_and_figures(
    studies: Iterable[Study],
    seeds: int | None,
    quick: bool,
    trained: Iterable[Run],
    cache: MeasurementCache,
    measuring: Callable[[str], AbstractContextManager[Any]],
) -> tuple[list[Claim], list[Plot]]:
    """Compute the claims and the figures of some studies from their runs and their cached measurements.

    `measuring` takes a study's name and gives a context whose value reports progress.
    """
    run_of = {run.config.folder: run for run in trained}
    claims: list[Claim] = []
    plots: list[Plot] = []
    for study in studies:
        repeats = seeds_of(study, seeds, quick)
        runs = {key: run_of[config.folder] for key, config in study.configs(repeats, quick).items()}
        with measuring(study.name) as progress:
            arrays = cache.load(study.name, study.measurements(repeats), progress, runs)
            evidence = study.measure({**runs, **arrays}, progress)
        claims += study.claims(evidence)
        plots += study.figures(evidence)
    return claims, plots


def reproduction_page(
    studies: Sequence[Study], claims: Sequence[Claim], plots: Sequence[Plot], runs: Sequence[Run], command: str
) -> page.Report:
    """The page of a reproduction: every claim with its measured number, and the figures."""
    names = "; ".join(f"{study.name}: {study.title}" for study in studies)
    return page.Report(
        title="The paper's experiments, reproduced",
        summary=f"{sum(c.met for c in claims)} of {len(claims)} claims met. Every number stands beside the paper's"
        + (f", those of runs with their 95 % interval over {seed_counts(runs)}." if runs else "."),
        command=command,
        facts={"experiments": names, **(provenance_facts(runs[-1]) if runs else {})},
        tables=[page_table(claims)],
        plots=plots,
        runs=runs,
    )
