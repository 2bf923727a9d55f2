"""The bound on honest uploads: Lemma 4 over simulated runs, and None where nothing is proven."""

from functools import cache

import numpy as np
import pytest
from honest_rounds import honest_rounds
from tiers import some_slow

from perfedrl.experiments.config import make_config
from perfedrl.federation.frames import Frame, encode
from perfedrl.federation.server.upload_bound import hard_bound
from perfedrl.federation.server.upload_checks import Expected, Gate, displacement

FIELDS = {"run": "run-1", "generation": "2", "round": "7"}
GRID = {"env": "gridworld", "width": 3, "horizon": 6}
PAPER = {"curvature": "score", "baseline": "none"}
PER_FEDAVG = {"name": "per-fedavg-pg", "alpha": 2.0, "beta": 0.5, "local_steps": 3, "m_in": 3, "m_h": 3, "m_out": 2}
ARMS = {"env": "bandits", "rewards": [[-1.0] * 9 + [1.0], [1.0] * 10]}
LINEAR = {"name": "log-linear", "features": [[[-1.0]] * 9 + [[1.0]]]}


def config(fleet=GRID, policy="table", algorithm=PER_FEDAVG, **more):
    policy = {"name": policy} if isinstance(policy, str) else policy
    table = {"name": "x", "seeds": 1, "rounds": 1, "fleet": fleet, "policy": policy, "algorithm": algorithm}
    return make_config(table | more)


@cache
def simulated(case):
    config, rounds, _ = CASES[case]
    return list(honest_rounds(config, rounds))


ARC = {"env": "arc", "goals": 6, "held_out": 0, "horizon": 10}
NEURAL = {"name": "per-fedavg-pg", "variant": "first-order", "alpha": 1.0, "beta": 0.2, "m_in": 5, "m_out": 5}
ARM_STEPS = {"name": "fedavg-pg", "alpha": 0.0, "beta": 0.01, "local_steps": 1, "m": 1}
CLIPPED = {"variant": "first-order", "clip": 0.01, "local_steps": 5, "m_out": 50}
CASES = {
    "exact": (config(**PAPER), 6, 0),
    "causal": (config(curvature="causal", baseline="leave-one-out"), 6, 0),
    "first-order": (config(algorithm=PER_FEDAVG | {"variant": "first-order"}, **PAPER), 12, 1e-3),
    "one arm": (config(ARMS, LINEAR, ARM_STEPS, **PAPER), 30, 0.8),
    "leave one out": (config(ARMS, LINEAR, ARM_STEPS | {"m": 2}, baseline="leave-one-out"), 30, 0.4),
    "clipped": (config(ARMS, LINEAR, PER_FEDAVG | CLIPPED, **PAPER), 6, 0.99),
    "arc": (config(ARC, "mlp", NEURAL), 12, None),
}
"""Configs, rounds, and a fraction of the bound that some honest upload exceeds."""


@pytest.mark.parametrize(
    "case", some_slow([case for case in CASES if case != "arc"], ["first-order", "one arm", "clipped"])
)
def test_no_honest_upload_is_beyond_the_bound(case):
    config, _, least = CASES[case]
    shares = [displacement(x, message) / hard_bound(config) for message, uploads in simulated(case) for x in uploads]
    assert least < max(shares) <= 1


def test_the_bound_is_lemma_4s():
    # R_max = 1, 1 / (1 - gamma) = 10, H + 1 = 7, G = 2, M = 4
    G_J, L_J = 2 * 100, (7 * 4 + 4) * 100
    exact = 0.5 * 3 * (1 + 2 * L_J) * G_J
    assert hard_bound(config(**PAPER)) == pytest.approx(exact, rel=2e-5)
    assert hard_bound(config(**PAPER)) > exact
    assert hard_bound(CASES["first-order"][0]) == pytest.approx(0.5 * 3 * G_J, rel=2e-5)
    doubled = 0.5 * 3 * (1 + 2 * 2 * L_J) * 2 * G_J
    assert hard_bound(CASES["causal"][0]) == pytest.approx(doubled, rel=2e-5)
    assert hard_bound(CASES["clipped"][0]) == pytest.approx(0.5 * 5 * 0.01, rel=2e-3)
    robust = config(aggregation={"name": "median"}, attack={"name": "sign-flip", "agents": 1}, **PAPER)
    assert hard_bound(robust) == hard_bound(config(**PAPER))


@pytest.mark.parametrize(
    "unproven",
    [
        {"baseline": "ridge"},
        {"entropy": 0.1},
        {"curvature": "marginalized"},
        {"curvature": "central-common"},
        {"privacy": {"clip": 1.0, "noise": 0.0}},
        {"algorithm": PER_FEDAVG | {"control": "limit"}},
        {"algorithm": PER_FEDAVG | {"adaptation_steps": 2}},
        {"algorithm": PER_FEDAVG | {"learn_alpha": "scalar", "clip": 0.1}},
        {"algorithm": PER_FEDAVG | {"optimizer": "adam", "clip": 0.1}},
        {"algorithm": PER_FEDAVG | {"anneal": 9, "clip": 0.1}},
        {"algorithm": {"name": "sg-mrl", "alpha": 1.0, "beta": 0.1}},
        {"algorithm": {"name": "per-fedavg-storm", "alpha": 1.0, "beta": 0.1}},
        {"fleet": {"env": "arc"}, "policy": "mlp"},
        {"fleet": {"env": "arc"}, "policy": "actor-critic", "baseline": "critic"},
        {"fleet": {"env": "bandits", "rewards": [[0.0, 0.0]] * 2}},
    ],
    ids=str,
)
def test_there_is_no_bound_where_nothing_is_proven(unproven):
    assert hard_bound(config(**{**PAPER, **unproven})) is None


@pytest.mark.parametrize("name", ["per-fedavg-pg", "sg-mrl", "per-fedavg-storm"])
def test_a_clip_bounds_any_policy_and_estimator(name):
    algorithm = {"name": name, "alpha": 0.1, "beta": 0.3, "clip": 0.6}
    bound = hard_bound(config({"env": "arc"}, "mlp", algorithm, entropy=0.05))
    assert bound == pytest.approx(0.3 * 5 * 0.6, rel=2e-3)


def uploads_of(uploads):
    return {f"site-{i}": encode(Frame("upload", FIELDS, x)) for i, x in enumerate(uploads)}


def scaled(upload, message, factor=1e6):
    return {name: message[name] + np.float32(factor) * (x - message[name]) for name, x in upload.items()}


@pytest.mark.parametrize("case", ["arc", "first-order"])
def test_honest_uploads_pass_and_scaled_ones_are_rejected(case):
    """Heterogeneous agents from the first round on; the attacker joins in the second."""
    honest, attacked = Gate(None), Gate(None)
    for k, (message, uploads) in enumerate(simulated(case)):
        expected = Expected("run-1", 2, 7, message)
        verdict = honest.judge(expected, uploads_of(uploads))
        assert (verdict.refused, verdict.clipped) == ({}, {})
        lie = [scaled(uploads[0], message), *uploads[1:]] if k else uploads
        verdict = attacked.judge(expected, uploads_of(lie))
        assert list(verdict.refused) == (["site-0"] if k else [])
    assert attacked.quarantined == ("site-0",)


def test_a_scaled_upload_is_beyond_the_first_order_bound():
    gate, (message, uploads) = Gate(hard_bound(CASES["first-order"][0])), simulated("first-order")[1]
    lie = uploads_of([scaled(uploads[0], message), *uploads[1:]])
    assert gate.judge(Expected("run-1", 2, 7, message), lie).refused.keys() == {"site-0"}


def test_an_opposite_upload_within_a_loose_bound_is_shortened():
    """The bound alone would take it whole: a hundred times as long as usual, against the others."""
    config, message, honest = CASES["first-order"][0], *simulated("first-order")[1]
    usual = float(np.median([displacement(upload, message) for upload in honest]))
    opposite = scaled(honest[0], message, -100 * usual / displacement(honest[0], message))
    bound = 1e3 * hard_bound(config)
    assert displacement(opposite, message) < bound
    verdict = Gate(bound).judge(Expected("run-1", 2, 7, message), uploads_of([opposite, *honest[1:]]))
    assert list(verdict.clipped) == ["site-0"]
    assert displacement(verdict.accepted["site-0"], message) < 20 * usual


@pytest.mark.slow
def test_an_absurd_upload_within_a_loose_bound_is_rejected():
    bound = hard_bound(CASES["exact"][0])
    message, honest = simulated("exact")[0]
    far = max(honest, key=lambda upload: displacement(upload, message))
    absurd = scaled(far, message, 0.9 * bound / displacement(far, message))
    assert displacement(absurd, message) < bound, "Lemma 4 alone would take it"
    verdict = Gate(bound).judge(Expected("run-1", 2, 7, message), uploads_of([absurd, *honest]))
    assert list(verdict.refused) == ["site-0"]
