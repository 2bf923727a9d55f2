"""The committed runs: made by the committed configs, and what the documents say of them is what they hold."""

import csv
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from perfedrl.studies.figures import FIGURES

from perfedrl.experiments.store import load_run
from perfedrl.experiments.training import saved
from perfedrl.report.plots import Dots, rows
from perfedrl.report.static import save
from perfedrl.report.tables import claim_cells
from perfedrl.studies import EXPERIMENTS, all_configs
from perfedrl.studies import FAMILIES as PAPER_FAMILIES
from perfedrl.studies.curvature import study as curvature_study

ROOT = Path(__file__).parents[2]
RESULTS, DRAWN = ROOT / "results", ROOT / "docs" / "figures"
SAMPLED = "variance of"
"""Claims about what is measured anew, by sampling."""

FAMILIES = RESULTS / "families"


@cache
def committed_configs():
    """The configs of the paper's experiments and those of the families' experiments."""
    return tuple(all_configs(list(group.values())) for group in (EXPERIMENTS, PAPER_FAMILIES))


@pytest.fixture(scope="module")
def evidence():
    """What claims and figures are made from: the committed runs, and for the theory what is measured anew."""
    found = {run.config.folder: run for run in saved(committed_configs()[0], RESULTS)}
    runs = lambda e: {key: found[config.folder] for key, config in e.configs(e.seeds, False).items()}  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        # Sampled variances differ between processors and are not compared here.
        patch.setattr(curvature_study, "REPLICATES", 4)
        return {name: e.measure(runs(e), lambda _: None) for name, e in EXPERIMENTS.items()}


def test_every_run_was_made_by_a_committed_config_and_none_is_left_over():
    for root, configs in zip((RESULTS, FAMILIES), committed_configs(), strict=True):
        folders = {path.name for path in root.iterdir() if path.is_dir()}
        assert folders - {FAMILIES.name, "mechanisms", "compare"} == {config.folder for config in configs}
        for config in configs:
            run = load_run(root / config.folder)  # compares the digest
            assert run.config == config
            assert len(run.history.seeds) in ((10, 20) if root is RESULTS else (5, 8, 10))
            assert np.isfinite(run.history.after).all()


def test_the_results_are_small():
    assert sum(path.stat().st_size for path in RESULTS.rglob("*")) < 5e6


@pytest.mark.parametrize("name", PAPER_FAMILIES)
def test_claims_and_figures_about_families_are_those_of_their_runs(name, tmp_path):
    experiment = PAPER_FAMILIES[name]
    runs = {
        key: load_run(FAMILIES / config.folder) for key, config in experiment.configs(experiment.seeds, False).items()
    }
    kept = [c for c in json.loads((FAMILIES / "claims.json").read_text()) if c["experiment"] == name]
    claims = experiment.claims(runs)
    assert [(c.claim, c.met) for c in claims] == [(c["claim"], c["met"]) for c in kept]
    np.testing.assert_allclose([c.measured for c in claims], [c["measured"] for c in kept])
    for plot in FIGURES[name](runs):
        assert (DRAWN / f"{plot.name}.png").is_file()
        assert (DRAWN / f"{plot.name}.csv").read_text() == save(plot, tmp_path)[2].read_text()


def test_the_claims_are_those_of_the_runs_and_the_documents_repeat_them(evidence):
    made = [claim for name, experiment in EXPERIMENTS.items() for claim in experiment.claims(evidence[name])]
    claims = [claim for claim in made if not claim.claim.startswith(SAMPLED)]
    all_kept = json.loads((RESULTS / "claims.json").read_text())
    kept = [c for c in all_kept if not c["claim"].startswith(SAMPLED)]
    assert len(made) == len(all_kept) == len(kept) + 3
    assert [(c.experiment, c.claim, c.met) for c in claims] == [(c["experiment"], c["claim"], c["met"]) for c in kept]
    np.testing.assert_allclose([c.measured for c in claims], [c["measured"] for c in kept])
    page = (ROOT / "docs" / "reproduction.md").read_text()
    for claim in claims:
        assert "| " + " | ".join(claim_cells(claim)) + " |" in page, f"docs/reproduction.md lacks {claim}"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_figures_in_the_documents_are_drawn_from_them(name, evidence, tmp_path):
    """Compared by the numbers beside them: pictures may differ between versions of the drawing library."""
    for plot in FIGURES[name](evidence[name]):
        assert (DRAWN / f"{plot.name}.png").is_file()
        if isinstance(plot, Dots):
            continue
        assert len(rows(plot)[1]) > 3
        kept, drawn = (DRAWN / f"{plot.name}.csv").read_text(), save(plot, tmp_path)[2].read_text()
        if name == "theory":  # sampled runs among them differ between processors in their last bits
            same_table(kept, drawn)
        else:
            assert kept == drawn


def same_table(kept: str, drawn: str) -> None:
    """The same labels, and numbers within two per cent."""
    for one, other in zip(csv.reader(kept.splitlines()), csv.reader(drawn.splitlines()), strict=True):
        for x, y in zip(one, other, strict=True):
            try:
                assert float(x) == pytest.approx(float(y), rel=0.02, abs=1e-12)
            except ValueError:
                assert x == y
