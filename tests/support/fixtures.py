"""Fixtures of several test files: a command line, and made-up runs of the studies."""

import os
import shutil
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from tiny_config import FEDAVG

from perfedrl import cli
from perfedrl.cli import console
from perfedrl.estimators import BASELINES, CURVATURES
from perfedrl.experiments import own_code
from perfedrl.experiments.store import Run
from perfedrl.simulation.history import Deployment, History
from perfedrl.studies import STUDIES
from perfedrl.studies.curvature.study import Evidence as CurvatureEvidence
from perfedrl.studies.estimators import (
    CURVATURE,
    EstimateError,
    Estimator,
    EstimatorComparison,
    EstimatorRow,
    ValueWithError,
)
from perfedrl.studies.lqr import study as lqr_study
from perfedrl.studies.paper_neural.study import BUDGETS, meta_config
from perfedrl.studies.privacy.study import CLIPPED, NO_PRIVACY
from perfedrl.studies.robustness.study import ATTACKS, MEAN
from perfedrl.studies.theory.study import SEEDS, Curve, TheoryMeasurements
from perfedrl.theory.realized_bounds import RealizedBound
from perfedrl.theory.witness import Agreement

OWN_MODULE = "from perfedrl import FedAvgPG\n\nclass Mine(FedAvgPG):\n    pass\n"
OWN_TABLE = {
    **FEDAVG,
    "name": "t",
    "seeds": 1,
    "rounds": 2,
    "fleet": {"env": "gridworld", "width": 2, "horizon": 2},
    "algorithm": {"name": "beside_for_test:Mine", "alpha": 1.0, "beta": 0.2, "m": 2},
}


def write(path, table):
    path.write_text(tomli_w.dumps(table))
    return path


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command in an empty folder and return its exit code, output and error output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*args):
        monkeypatch.setattr(sys, "argv", ["perfedrl", *map(str, args)])
        for printer in (console.out, console.err):
            printer.width = 200
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


def history(config, after, **outcomes) -> History:
    """A history with given values at all evaluations, [evaluation] or [seed, evaluation]."""
    rounds = np.asarray([0, *config.stops])
    shape = (len(config.seeds), len(rounds), config.experiment.fleet.agents)
    full = lambda x: np.broadcast_to(np.asarray(x, float)[..., None], shape)  # noqa: E731
    per_round = config.experiment.algorithm.trajectories_per_round
    nobody = np.zeros((*shape[:2], 0))
    named = {name.replace("_", "."): full(x) for name, x in outcomes.items()}
    return History(
        np.asarray(config.seeds),
        rounds,
        rounds * per_round,
        rounds * 8,
        full(after) * 0.6,
        full(after),
        nobody,
        nobody,
        named,
    )


def fake_run(config, after, deployment=None, **outcomes) -> Run:
    return Run(Path("nowhere"), config, history(config, after, **outcomes), None, {}, deployment)


def rising(config, level):
    """A return after adaptation that rises linearly to a level."""
    rounds = np.asarray([0, *config.stops])
    return 0.3 + (level - 0.3) * rounds / rounds[-1]


@pytest.fixture(scope="session")
def tabular_runs():
    level = {"exact": 0.15, "first-order": 0.12, "fedavg-pg": 0.09}
    configs = STUDIES["e3"].configs(3, False)
    return {(v, a): fake_run(config, rising(config, 0.5 + level[v] * a)) for (v, a), config in configs.items()}


@pytest.fixture(scope="session")
def curvature_runs():
    """Ten seeds: all fail up to 200; at 1000 six of them train."""
    level = {10: 0.2, 50: 0.2, 100: 0.2, 200: 0.25, 500: 0.4, "fedavg-pg": 1.75}
    runs = {}
    for key, config in STUDIES["e4"].configs(10, False).items():
        final = np.full(10, level.get(key, 0.0))
        if key == 1000:
            final = np.asarray([0.5] * 4 + [1.6] * 6)
        runs[key] = fake_run(config, final[:, None] * np.linspace(0, 1, len(config.stops) + 1))
    return runs


def paths(reached: int) -> np.ndarray:
    """Twelve episodes of which some end at the held-out goal at -0.4 rad, and the others stay at the far corner."""
    goal = 0.8 * np.asarray([np.cos(-0.4), np.sin(-0.4)])
    there = np.linspace([-1.0, 1.0], goal, 21)
    away = np.broadcast_to([-1.0, 1.0], (21, 2))
    return np.stack([there] * reached + [away] * (12 - reached))


@pytest.fixture(scope="session")
def deployed_runs():
    """Meta-trained and from-scratch runs with the paper's own numbers."""
    few = STUDIES["e5"].configs(3, False)
    shown = STUDIES["e7"].configs(3, False)
    by_budget = lambda values: np.broadcast_to(np.asarray(values, float)[None, :, None], (3, 6, 3))  # noqa: E731
    episodes = np.stack([np.stack([paths(12 if m == 200 else 9)] * 3) for m in BUDGETS])
    deployment = Deployment(
        np.asarray(BUDGETS),
        {
            "return": by_budget([1.53, 1.0, 1.3, 1.52, 1.94, 2.0]),
            "success": by_budget([0.75, 0.62, 0.7, 0.8, 0.86, 0.9]),
        },
        episodes[None],
    )
    scratch = fake_run(
        few["from scratch"],
        [0.45, 0.22, 0.25, 0.3, 0.5, 1.7, 2.0],
        after_success=[0.1, 0.15, 0.18, 0.2, 0.3, 0.85, 0.9],
        before_success=[0.1] * 7,
    )
    alone = Deployment(
        np.asarray([0]),
        {"return": np.zeros((3, 1, 3)), "success": np.zeros((3, 1, 3))},
        np.stack([paths(5)] * 3)[None, None],
    )
    flat = lambda config: [0.3] * (len(config.stops) + 1)  # noqa: E731
    return {
        "first-order": fake_run(few["first-order"], flat(few["first-order"]), deployment),
        "from scratch": scratch,
        "from scratch, shown": fake_run(
            shown["from scratch, shown"], [0.2] * 4, alone, after_success=[0.2] * 4, before_success=[0.1] * 4
        ),
    }


@pytest.fixture(scope="session")
def theory_study():
    """Made-up measurements that meet all claims of the theory: power laws with the paper's exponents, below bounds."""
    alphas, sizes, accuracies = 10.0 ** np.arange(-4, 1), 4.0 ** np.arange(4), np.asarray([1e-6, 1e-2])
    law = lambda x, power, scale=1.0: Curve(x, scale * x**power)  # noqa: E731
    at, rate = np.arange(1.0, 4.0), {"crude": -3.0, "sharp": -2.5, "cheapest": -2.0}
    moments = {name: law(sizes, -1.0) for name in ("m_in", "m_h", "m_out")}
    measured = Curve(at, np.stack(SEEDS * [at]))
    return TheoryMeasurements(
        bias={name: law(sizes, -1.0) for name in ("nothing", "inner", "outer")}
        | {"crude": law(sizes, -0.5, 1e3), "sharp": law(sizes, -1.0, 1e2)},
        second_moment=moments | {f"{name}, bound": law(sizes, -1.0, 10.0) for name in moments},
        residual={"witness": law(alphas, 1.0), "attracting": law(alphas, 1.0), "bound": law(alphas, 1.0, 10.0)},
        drift={"way": law(at, 0.5), "apart": law(at, 0.4), "bound": law(at, 1.0, 10.0)},
        objectives={name: Curve(at, at) for name in ("uniform", "trained")},
        small_adaptation={
            name: law(alphas, 1.0, 10.0 if "bound" in name else 1.0)
            for name in ("value", "gradient", "value, bound", "gradient, bound")
        },
        convergence=dict.fromkeys(("tau = 1", "tau = 4"), measured)
        | {f"tau = {tau}, bound": law(at, 1.0, 10.0) for tau in (1, 4)},
        rounds=dict.fromkeys(rate, law(accuracies, -1.5)),
        trajectories={name: law(accuracies, power) for name, power in rate.items()},
        local_steps=law(accuracies, -0.5),
        realized=[RealizedBound(f"quantity {i}", "G", "Lemma 1", 10.0, 1.0) for i in range(5)],
        witness=[Agreement("theta*", -0.5, -0.5)],
    )


@pytest.fixture(scope="session")
def quiet_runs():
    """Runs of the curvature study, in which the paper's form fails and the others train, and variances."""
    configs = STUDIES["curvature"].configs(3, False)
    level = {"score": 0.2, "exact": 0.95, "first-order": 0.9, "fedavg-pg": 0.8}
    runs = {
        (way, m): fake_run(config, rising(config, level[way] if way == "score" or m == "grid" else 2.4))
        for (way, m), config in configs.items()
    }
    made = lambda form, baseline: Estimator(  # noqa: E731
        CURVATURE, form, baseline, "none", 100, CURVATURES[form](), BASELINES[baseline]()
    )
    error = EstimateError(ValueWithError(1.0, 0.1), ValueWithError(0.0, 0.1), False, 1.0)
    rows = tuple(
        EstimatorRow(
            stage,
            k,
            made(form, baseline),
            error._replace(variance=ValueWithError(v, 0.1)),
            ValueWithError(v, 0.01),
            300.0,
        )
        for k, stage in enumerate(("start", "middle", "end"))
        for form, baseline, v in (("score", "none", 1.0), ("causal", "ridge", 0.2 - 0.06 * k))
    )
    return CurvatureEvidence(runs, EstimatorComparison(meta_config(1), 0, 100, 100, 6, 1000, rows))


@pytest.fixture(scope="session")
def recommended_runs():
    """Runs of the few-shot study, in which the recommended recipe helps at all budgets."""
    values = {"return": [1.7, 2.6, 2.8, 2.85, 2.9, 2.95], "success": [0.8, 0.95, 0.97, 0.98, 0.99, 0.99]}
    by_budget = {k: np.broadcast_to(np.asarray(v)[None, :, None], (3, 6, 3)) for k, v in values.items()}
    episodes = np.stack([np.stack([paths(12 if m else 10)] * 3) for m in BUDGETS])
    deployment = Deployment(np.asarray(BUDGETS), by_budget, episodes[None])
    configs = STUDIES["fewshot"].configs(3, False)
    return {key: fake_run(config, rising(config, 2.4), deployment) for key, config in configs.items()}


@lru_cache
def configs_of(name):
    """The configs of a study with many configs, made once."""
    return STUDIES[name].configs(3, False)


@pytest.fixture(scope="session")
def attacked_runs():
    """Runs in which every attack harms the mean and no robust aggregation."""
    configs = configs_of("robustness")
    fallen = lambda attack, rule: attack in ATTACKS and rule == MEAN  # noqa: E731
    return {key: fake_run(config, rising(config, 0.5 if fallen(*key) else 2.8)) for key, config in configs.items()}


@pytest.fixture(scope="session")
def private_runs():
    """Runs in which little noise costs little return, and much noise almost all."""
    level = {
        NO_PRIVACY: 2.5,
        CLIPPED: 2.4,
        0.1: 2.4,
        0.3: 2.3,
        1.0: 1.5,
        3.0: 0.5,
        10.0: 0.2,
    }
    configs = configs_of("privacy")
    return {key: fake_run(config, rising(config, level[key])) for key, config in configs.items()}


def lqr_outcomes():
    """Made-up outcomes of linear systems that meet all claims: one step halves each gap."""
    at, moments = (
        np.arange(lqr_study.FROM, lqr_study.ROUNDS + 1, lqr_study.EVERY),
        {lqr_study.BEFORE: 1.0, lqr_study.AFTER: 0.5},
    )
    gaps = {(m, when): np.full((2, len(at)), x) for m in lqr_study.METHODS for when, x in moments.items()}
    average = {when: np.full(2, x) for when, x in moments.items()}
    outcome = lqr_study.RelativeCosts(at, gaps, average, np.asarray([[0.9, 1.0]] * 2), np.full(4, 0.8), np.full(4, 0.7))
    same = outcome._replace(gaps={key: 1e-12 * x for key, x in gaps.items()})
    return {0.0: same, 0.1: outcome, 0.5: outcome}


@pytest.fixture(scope="session")
def runs_of(
    tabular_runs,
    curvature_runs,
    deployed_runs,
    theory_study,
    quiet_runs,
    recommended_runs,
    attacked_runs,
    private_runs,
):
    """The evidence of each study of the group "all"."""
    return {
        **dict.fromkeys(("e1", "e3", "e6"), tabular_runs),
        "e4": curvature_runs,
        **dict.fromkeys(("e5", "e7"), deployed_runs),
        "theory": theory_study,
        "curvature": quiet_runs,
        "fewshot": recommended_runs,
        "robustness": attacked_runs,
        "privacy": private_runs,
        "lqr": lqr_outcomes(),
    }


@pytest.fixture(scope="session")
def browser():
    """Chromium without a window, steered by Selenium; tests are skipped where it is not installed."""
    binary, driver_binary = shutil.which("chromium"), shutil.which("chromedriver")
    if not (binary and driver_binary):
        if os.environ.get("CI"):
            pytest.fail("continuous integration needs chromium and chromium-driver")
        pytest.skip("needs Debian's chromium and chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"):
        options.add_argument(f"--{flag}")
    for flag in ("disable-background-networking", "disable-component-update", "window-size=1100,1000"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(driver_binary))
    yield driver
    driver.quit()


@pytest.fixture
def anew(monkeypatch):
    """A function that forgets modules and folders as a new process does; called at both ends of a test."""
    folders = list(sys.path)

    def forget():
        monkeypatch.setattr(sys, "path", list(folders))
        sys.modules.pop("beside_for_test", None)
        own_code._read.clear()

    forget()
    yield forget
    forget()


@pytest.fixture
def own_config(tmp_path, anew):
    """A config with a module beside it, in a folder that is not the current one."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "beside_for_test.py").write_text(OWN_MODULE)
    return write(tmp_path / "d" / "t.toml", OWN_TABLE)
