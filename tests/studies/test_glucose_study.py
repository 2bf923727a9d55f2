"""The study of people with type 1 diabetes: rules without learning by hand, and claims from made-up outcomes."""

from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.compilation import jit
from perfedrl.envs.glucose.patients import HELD_OUT, split
from perfedrl.envs.glucose.task import MEAL, PORTION, READINGS, TYPICAL, UNIT
from perfedrl.experiments.config import load_config
from perfedrl.simulation.history import Deployment
from perfedrl.studies.glucose import GLUCOSE, clinical_rules
from perfedrl.studies.glucose.study import BUDGETS, CEILING, DAYS, PERSONALIZED, PROFILE, RULES, SCRATCH, SHARED, UNSEEN

CONFIGS = Path(__file__).parents[2] / "configs"
ZERO = jnp.zeros(())


def observation(task, reading, before, grams):
    """An observation with two readings and an announced meal."""
    obs = np.zeros(READINGS + 5, np.float32)
    obs[0], obs[1] = (reading - TYPICAL) / UNIT, (before - TYPICAL) / UNIT
    obs[MEAL] = grams / (PORTION / 1000 * (task.weight / 70) ** 0.75)
    return jnp.asarray(obs)


def test_the_basal_bolus_rule_by_hand():
    """60 g at a reading of 200: 60 / 10 for the meal, (200 - 140) / 8.77 for the correction; nothing between meals."""
    task = pf.envs.glucose(patients=["adult#001"], held_out=[]).task(0)
    _, doses = clinical_rules.basal_bolus(task, ZERO, observation(task, 200, 200, 60))
    np.testing.assert_allclose(doses, [1.267, 6 + 60 / 8.7731], rtol=1e-3)
    assert clinical_rules.basal_bolus(task, ZERO, observation(task, 145, 145, 60))[1].bolus == pytest.approx(
        6, rel=1e-4
    )
    assert clinical_rules.basal_bolus(task, ZERO, observation(task, 300, 300, 0))[1].bolus == 0


def test_the_pid_controller_by_hand():
    """An error of 40, an integral of 50 + 40 / 4 and a slope of 2 per minute, relative to 100 and the basal rate."""
    task = pf.envs.glucose(patients=["adult#001"], held_out=[]).task(0)
    memory, doses = clinical_rules.pid(jnp.asarray([1.0, 0.1, 30.0]))(
        task, jnp.asarray(50.0), observation(task, 180, 150, 60)
    )
    assert memory == pytest.approx(60)
    assert doses.basal == pytest.approx(task.basal * (1 + (40 + 6 + 60) / 100), rel=1e-4)
    assert doses.bolus == 0


def test_an_action_asks_for_the_doses_of_a_rule():
    task = pf.envs.glucose(patients=["child#002"], held_out=[]).task(0)
    obs = observation(task, 150, 150, 30)
    action = clinical_rules.as_action(task, clinical_rules.Doses(jnp.asarray(0.5), jnp.asarray(2.0)), obs)
    np.testing.assert_allclose(task.doses(action, task.announced_grams(obs)), [0.5, 2.0], rtol=1e-4)


def test_own_clinical_numbers_serve_better_than_those_of_somebody_else():
    fleet = pf.envs.glucose(patients=["adult#001", "adolescent#008"], held_out=[])
    measure = jit(lambda tasks: clinical_rules.outcomes(tasks, clinical_rules.basal_bolus, 0, 5)["risk_index"])
    exchanged = {"basal", "carbohydrate_ratio", "correction_factor"}
    other = type(fleet.train)(**{name: x[::-1] if name in exchanged else x for name, x in fleet.train.settings.items()})
    assert (measure(fleet.train) < measure(other)).all()


def made_up(in_range):
    """A run whose deployment has these shares of time in range at every budget."""
    inside = np.broadcast_to(np.asarray(in_range)[:, None], (4, len(BUDGETS), len(UNSEEN)))
    inside = inside + 0.001 * np.arange(4)[:, None, None]
    outcomes = {"in_range": inside, "below_70": 0.02 + 0 * inside}
    deployed = Deployment(np.asarray(BUDGETS), outcomes, np.zeros((0, len(BUDGETS), len(UNSEEN), 0)))
    return SimpleNamespace(deployed=deployed, config=SimpleNamespace(seeds=range(4)))


def evidence():
    runs = {
        key: made_up(np.full((4, len(UNSEEN)), share))
        for key, share in ((PERSONALIZED, 0.86), (SHARED, 0.7), (CEILING, 0.9), (SCRATCH, 0.5))
    }
    shares = {f"{rule}.{what}": np.full(6, 0.6) for rule in ("basal_bolus", "pid") for what in ("in_range", "below_70")}
    return {**runs, RULES: shares, PROFILE: {"readings": np.full((2, 6, 5, 96), 120.0)}}


def test_claims_of_made_up_outcomes_are_those_computed_by_hand():
    goals = GLUCOSE.claims(evidence())[:5]
    assert [claim.met for claim in goals] == [True] * 5
    assert goals[4].measured == pytest.approx(0.16 / 0.2, abs=1e-3)
    worse = evidence() | {PERSONALIZED: made_up(np.tile([0.9, 0.9, 0.9, 0.5, 0.9, 0.9], (4, 1)))}
    assert [claim.met for claim in GLUCOSE.claims(worse)[:5]] == [False, True, False, True, True]
    assert GLUCOSE.claims(worse)[2].measured == pytest.approx(0.5015)


def test_figures_name_the_worst_patient():
    worse = evidence() | {PERSONALIZED: made_up(np.tile([0.9, 0.9, 0.9, 0.5, 0.9, 0.9], (4, 1)))}
    plots = {plot.name: plot for plot in GLUCOSE.figures(worse)}
    assert plots["glucose-days-worst"].title == f"Days of {UNSEEN[3]}"
    assert plots["glucose-patients"].labels == UNSEEN
    assert DAYS == 20


def test_the_shipped_config_is_that_of_the_study():
    assert load_config(CONFIGS / "glucose.toml") == GLUCOSE.configs(GLUCOSE.seeds, False)[PERSONALIZED]


def test_nobody_is_tested_on_whom_settings_were_chosen():
    """Settings were chosen with the fleet's default patients unseen; these train here, beside all others but six."""
    for made in GLUCOSE.configs(GLUCOSE.seeds, False).values():
        train, unseen = split(made.fleet.get("patients", ()), made.fleet["held_out"])
        assert [x.name for x in unseen] == list(UNSEEN)
        assert len(train) == 24
        assert {x.name for x in train} >= set(HELD_OUT)
