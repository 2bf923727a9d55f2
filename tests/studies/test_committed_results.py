"""The committed runs: made by the committed configs, with claims, figures and documents that agree with them."""

import csv
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from committed_claims import check_committed, check_on_page
from tiers import some_slow

from perfedrl.experiments.store import load_run
from perfedrl.report.plots import Dots, rows
from perfedrl.report.static import save
from perfedrl.studies import GROUPS
from perfedrl.studies.curvature import study as curvature_study
from perfedrl.studies.measurement_cache import MeasurementCache
from perfedrl.studies.reproduction import all_configs

ROOT = Path(__file__).parents[2]
RESULTS, DRAWN = ROOT / "results", ROOT / "docs" / "figures"
SAMPLED = "variance of"
"""The first words of claims about newly sampled variances."""

FURTHER = {group: RESULTS / group for group in ("families", "machines")}
"""Where the runs of other groups of studies are."""

FURTHER_STUDIES = [(group, name) for group in FURTHER for name in GROUPS[group]]


@cache
def committed_configs():
    """The configs of the groups whose runs are committed, by the folder of these."""
    roots = {"all": RESULTS, **FURTHER}
    return {root: all_configs(list(GROUPS[group].values())) for group, root in roots.items()}


STUDIES = GROUPS["all"]
READ = [name for name in STUDIES if name not in ("theory", "curvature", "lqr")]
"""Studies whose evidence is their committed runs; for the others it is computed for a minute or so."""


@cache
def evidence_of(name):
    """The evidence of a study: its committed runs, or new measurements."""
    study = STUDIES[name]
    runs = {key: load_run(RESULTS / config.folder) for key, config in study.configs(study.seeds, False).items()}
    with pytest.MonkeyPatch.context() as patch:
        # Sampled variances differ between processors and are not compared here.
        patch.setattr(curvature_study, "REPLICATES", 4)
        return study.measure(runs, lambda _: None)


@pytest.mark.slow
def test_every_committed_run_has_a_committed_config():
    for root, configs in committed_configs().items():
        folders = {path.name for path in root.iterdir() if path.is_dir()}
        assert folders - {*FURTHER, "mechanisms", "compare"} == {config.folder for config in configs}
        for config in configs:
            run = load_run(root / config.folder)  # compares the digest
            assert run.config == config
            assert len(run.history.seeds) in ((10, 20) if root is RESULTS else (4, 5, 8, 10))
            assert np.isfinite(run.history.after).all()


def test_the_results_are_small():
    """Count files alone: what a folder itself takes depends on the file system and is not committed."""
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) < 8e6


@pytest.mark.parametrize("group", FURTHER)
def test_every_committed_measurement_belongs_to_a_study(group, untyped):
    wanted = set()
    for name, study in GROUPS[group].items():
        runs = {key: SimpleNamespace(config=config) for key, config in study.configs(study.seeds, False).items()}
        wanted |= {one.file(name, runs) for one in study.measurements(study.seeds)}
    assert {path.name for path in FURTHER[group].glob("*.npz")} == wanted


@pytest.mark.parametrize(
    ("group", "name"), some_slow(FURTHER_STUDIES, [x for x in FURTHER_STUDIES if x[0] == "families"])
)
def test_claims_and_figures_of_other_groups_match_the_committed_runs(group, name, tmp_path):
    study, root = GROUPS[group][name], FURTHER[group]
    runs = {key: load_run(root / config.folder) for key, config in study.configs(study.seeds, False).items()}
    arrays = MeasurementCache(root, only_saved=True).load(name, study.measurements(study.seeds), runs=runs)
    committed = [c for c in json.loads((root / "claims.json").read_text()) if c["experiment"] == name]
    evidence = {**runs, **arrays}
    check_committed(study.claims(evidence), committed)
    for plot in study.figures(evidence):
        assert (DRAWN / f"{plot.name}.png").is_file()
        assert (DRAWN / f"{plot.name}.csv").read_text() == save(plot, tmp_path)[2].read_text()


@pytest.mark.parametrize("name", some_slow(STUDIES, READ))
def test_claims_match_the_committed_ones_and_the_documents(name):
    made = STUDIES[name].claims(evidence_of(name))
    claims = [claim for claim in made if not claim.claim.startswith(SAMPLED)]
    all_committed = [c for c in json.loads((RESULTS / "claims.json").read_text()) if c["experiment"] == name]
    committed = [c for c in all_committed if not c["claim"].startswith(SAMPLED)]
    assert len(made) == len(all_committed) == len(committed) + (3 if name == "curvature" else 0)
    check_committed(claims, committed)
    check_on_page(claims, "reproduction.md")


def test_committed_claims_are_in_the_order_of_the_studies():
    names = [c["experiment"] for c in json.loads((RESULTS / "claims.json").read_text())]
    assert list(dict.fromkeys(names)) == list(STUDIES)
    assert sorted(names, key=list(STUDIES).index) == names


@pytest.mark.parametrize("name", some_slow(STUDIES, READ))
def test_figures_match_the_committed_ones(name, tmp_path):
    """Compare the CSV files: pictures may differ between versions of the drawing library."""
    for plot in STUDIES[name].figures(evidence_of(name)):
        assert (DRAWN / f"{plot.name}.png").is_file()
        if isinstance(plot, Dots):
            continue
        assert len(rows(plot)[1]) > 3
        committed, drawn = (DRAWN / f"{plot.name}.csv").read_text(), save(plot, tmp_path)[2].read_text()
        if name == "theory":  # its sampled runs differ between processors in their last bits
            same_table(committed, drawn)
        else:
            assert committed == drawn


def same_table(committed: str, drawn: str) -> None:
    """Assert that two tables have the same labels, and numbers within two per cent."""
    for one, other in zip(csv.reader(committed.splitlines()), csv.reader(drawn.splitlines()), strict=True):
        for x, y in zip(one, other, strict=True):
            try:
                assert float(x) == pytest.approx(float(y), rel=0.02, abs=1e-12)
            except ValueError:
                assert x == y
