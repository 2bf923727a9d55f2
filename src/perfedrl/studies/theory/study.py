"""Measurements and claims: the paper's bounds and rates against exact quantities."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

import perfedrl.theory as th
from perfedrl import exact
from perfedrl.algorithms import PerFedAvgPG
from perfedrl.envs import Fleet, TabularMDP, gridworld
from perfedrl.envs.bandits import bandits
from perfedrl.errors import UserError
from perfedrl.policies import LogLinearSoftmax, TableSoftmax
from perfedrl.studies.claims import Claim, everywhere, point, single
from perfedrl.studies.paper_tabular.study import tabular
from perfedrl.theory.estimate import Batches, enumerated, shared_mean
from perfedrl.theory.fleet_problem import first_parameters, guarantee, problem, settings
from perfedrl.theory.local_step_trace import trace
from perfedrl.theory.realized_bounds import RealizedBound, drifts, realized, squared_meta_gradients
from perfedrl.theory.witness import ALPHAS, Agreement, agreements, attracting_witness, continued, paper_witness
from perfedrl.types import Progress

SIZES = [2**k for k in range(7)]
"""Batch sizes, 1 to 64."""
ALPHA, OTHERS = 2.0, 64
"""The adaptation step size of both measurements by batch size, and the size of the batches that do not vary."""
SLOPE_FROM = 4
"""The smallest batch size of the fits of slopes, which are those of large batches."""
ACCURACIES = 10.0 ** -np.arange(2, 9)
"""Values of epsilon over six decades."""
ACCURACY, SEEDS = 0.1, 5
"""Accuracy and number of seeds of the runs that are compared with Theorem 1."""
SHARED: tuple[Literal["nothing", "inner", "outer"], ...] = ("nothing", "inner", "outer")


class Curve(NamedTuple):
    """Values over x; one row per seed where there are seeds."""

    x: np.ndarray
    y: np.ndarray

    @property
    def slope(self) -> float:
        """The exponent of x in y, by least squares on logarithms."""
        return float(np.polyfit(np.log(self.x), np.log(np.atleast_2d(self.y).mean(axis=0)), 1)[0])

    def above(self, least: float) -> "Curve":
        """The part of the curve with x >= least."""
        return Curve(self.x[self.x >= least], self.y[..., self.x >= least])


class TheoryMeasurements(NamedTuple):
    """The measurements of `perfedrl reproduce theory`; curves by name."""

    bias: dict[str, Curve]
    second_moment: dict[str, Curve]
    residual: dict[str, Curve]
    drift: dict[str, Curve]
    objectives: dict[str, Curve]
    small_adaptation: dict[str, Curve]
    convergence: dict[str, Curve]
    rounds: dict[str, Curve]
    trajectories: dict[str, Curve]
    local_steps: Curve
    realized: list[RealizedBound]
    witness: list[Agreement]


def measure_all(progress: Progress = lambda _: None) -> TheoryMeasurements:
    """Run all measurements; takes half a minute."""
    parts: dict[str, Any] = {}
    for name, measure in PARTS.items():
        progress(name.replace("_", " "))
        parts |= measure()
    return TheoryMeasurements(**parts)


def bandit() -> tuple[TabularMDP, TableSoftmax, np.ndarray]:
    """A three-armed bandit, small enough to enumerate all batches, with a policy and parameters."""
    return bandits(((1.0, 0.4, 0.0),)).task(0), TableSoftmax(1, 3), np.zeros((1, 3))


def measure_bias() -> dict:
    """The exact bias by inner batch with both bounds, also with a curvature batch shared with another batch."""
    (mdp, policy, theta), alpha = bandit(), ALPHA
    c = th.constants(mdp, policy, alpha)
    target = np.ravel(exact.meta_gradient([mdp], theta, alpha, policy))
    variance = enumerated(mdp, policy, theta, alpha, Batches(1, 1, 1)).variance
    means = {s: [shared_mean(mdp, policy, theta, alpha, m, s) for m in SIZES] for s in SHARED}
    curves: dict[str, Curve] = {
        s: Curve(np.asarray(SIZES), np.linalg.norm(np.asarray(mean) - target, axis=1)) for s, mean in means.items()
    }
    curves["crude"] = Curve(np.asarray(SIZES), np.asarray([th.bias(c, m) for m in SIZES]))
    curves["sharp"] = Curve(np.asarray(SIZES), np.asarray([th.sharp_bias(c, m, variance=variance) for m in SIZES]))
    return {"bias": curves}


def measure_second_moment() -> dict:
    """The exact mean squared error of the estimate by each batch size, with the others fixed."""
    (mdp, policy, theta), alpha = bandit(), ALPHA
    c = th.constants(mdp, policy, alpha)
    curves = {}
    for name in Batches._fields:
        sizes = [Batches(OTHERS, OTHERS, OTHERS)._replace(**{name: m}) for m in SIZES]
        curves[name] = Curve(
            np.asarray(SIZES), np.asarray([enumerated(mdp, policy, theta, alpha, s).second_moment for s in sizes])
        )
        curves[f"{name}, bound"] = Curve(np.asarray(SIZES), np.asarray([th.second_moment(c, *s) for s in sizes]))
    return {"second_moment": curves}


def measure_residual() -> dict:
    """The meta-gradient at first-order fixed points by alpha, for the paper's witness and for an attracting one."""
    alphas = np.asarray(sorted(ALPHAS))
    curves = {
        name: Curve(alphas, np.asarray([residual_of(*made, float(a)) for a in alphas]))
        for name, made in {"witness": paper_witness(), "attracting": attracting_witness()}.items()
    }
    c = th.constants(*paper_witness())
    curves["bound"] = Curve(alphas, np.asarray([th.residual(c.at(a)) for a in alphas]))
    return {"residual": curves, "witness": agreements()}


def residual_of(fleet: Fleet, policy: LogLinearSoftmax, alpha: float) -> float:
    """The norm of the meta-gradient at the fixed point; nan where there is no fixed point."""
    try:
        return continued(fleet, policy, alpha).residual
    except UserError:
        return float("nan")


def measure_drift() -> dict:
    """Client drift by local step on the gridworld, the largest over rounds and agents."""
    algorithm = PerFedAvgPG(alpha=2.0, beta=0.3, local_steps=20)
    fleet, policy = gridworld(), TableSoftmax(25, 4)
    way, apart = drifts(trace(fleet, policy, algorithm, rounds=10))
    steps = np.arange(1, 21)
    bound = [th.drift(th.constants(fleet, policy, 2.0), 0.3, int(t)) for t in steps]
    curves = {"way": way[1:], "apart": np.sqrt(apart[1:]), "bound": np.asarray(bound)}
    return {"drift": {name: Curve(steps, y) for name, y in curves.items()}}


def measure_objectives() -> dict:
    """F and f by alpha on the gridworld, at the start and after training, and their distance."""
    fleet, policy = gridworld(), TableSoftmax(25, 4)
    run = trace(fleet, policy, PerFedAvgPG(alpha=2.0, beta=0.3), rounds=80)
    trained = np.asarray(run.server[-1])
    alphas, small = np.linspace(0, 4, 17), 10.0 ** np.arange(-4, 1)

    def value(theta: Any, at: Iterable[float]) -> np.ndarray:
        return np.asarray([exact.meta_objective(fleet, theta, a, policy) for a in at])

    def gradient(a: float) -> Any:
        return exact.meta_gradient(fleet, trained, a, policy)

    far = [th.small_adaptation(th.constants(fleet, policy, a)) for a in small]
    apart = {
        "value": np.abs(value(trained, small) - value(trained, [0.0])),
        "gradient": np.asarray([np.linalg.norm(gradient(a) - gradient(0.0)) for a in small]),
        "value, bound": np.asarray([x.value for x in far]),
        "gradient, bound": np.asarray([x.gradient for x in far]),
    }
    points = {"uniform": first_parameters(policy), "trained": trained}
    return {
        "objectives": {name: Curve(alphas, value(theta, alphas)) for name, theta in points.items()},
        "small_adaptation": {name: Curve(small, y) for name, y in apart.items()},
    }


def small_problem(alpha: float = 1 / 16) -> tuple:
    """Two bandits with a table softmax, whose constants are small enough to run the planner's plans.

    The default alpha is 1 / (2 L_J), the end of the moderate regime.
    """
    fleet, policy = bandits(), TableSoftmax(1, 3)
    return fleet, policy, problem(fleet, policy, PerFedAvgPG(alpha, 1.0))


def measure_convergence() -> dict:
    """The mean squared meta-gradient up to each round of planned runs, with the bound of Theorem 1."""
    fleet, policy, p = small_problem()
    curves = {}
    for tau in (1, 4):
        plan = th.cheapest(p, ACCURACY, th.Given(tau=tau))
        algorithm = PerFedAvgPG(p.constants.alpha, plan.beta, tau, plan.m_in, plan.m_h, plan.m_out)
        squares = np.stack(
            [
                squared_meta_gradients(fleet, policy, trace(fleet, policy, algorithm, plan.K, seed), algorithm.alpha)
                for seed in range(SEEDS)
            ]
        ).mean(axis=2)
        shown = np.unique(np.geomspace(1, plan.K, 25).round().astype(int))
        running = squares.cumsum(axis=1) / np.arange(1, plan.K + 1)
        curves[f"tau = {tau}"] = Curve(shown, running[:, shown - 1])
        said = settings(algorithm)
        curves[f"tau = {tau}, bound"] = Curve(shown, np.asarray([guarantee(p, said, int(k)).total for k in shown]))
    return {"convergence": curves}


def measure_plans() -> dict:
    """Rounds and trajectories by accuracy: Corollary 1 with both bounds on the bias, and the cheapest plan."""
    *_, p = small_problem()
    plans = {
        "crude": [th.corollary_1(p, e, "crude") for e in ACCURACIES],
        "sharp": [th.corollary_1(p, e, "sharp") for e in ACCURACIES],
        "cheapest": [th.cheapest(p, e) for e in ACCURACIES],
    }

    def curve(made: list, field: str) -> Curve:
        return Curve(ACCURACIES, np.asarray([float(getattr(plan, field)) for plan in made]))

    return {
        "rounds": {name: curve(made, "K") for name, made in plans.items()},
        "trajectories": {name: curve(made, "trajectories") for name, made in plans.items()},
        "local_steps": curve(plans["crude"], "tau"),
    }


def measure_realized() -> dict:
    """Bounds and realized values on the paper's gridworld."""
    parts = tabular("exact", 2.0, seeds=1).experiment
    p = problem(parts.fleet, parts.policy, parts.algorithm)
    return {"realized": realized(p, parts.fleet, parts.policy, parts.algorithm)}


PARTS = {
    "bias": measure_bias,
    "second_moment": measure_second_moment,
    "first-order_floor": measure_residual,
    "drift": measure_drift,
    "objectives": measure_objectives,
    "convergence": measure_convergence,
    "plans": measure_plans,
    "realized_constants": measure_realized,
}


def claims(s: TheoryMeasurements) -> list[Claim]:
    """The exponents of Sections 3 to 5, and that every measured value lies within its bound."""
    slopes = [
        ("power of m_in in the bias (Prop. 1)", -1.0, s.bias["nothing"].above(SLOPE_FROM), 0.05),
        ("power of m_in in the crude bound (Lemma 3)", -0.5, s.bias["crude"], 1e-9),
        ("power of alpha in the first-order residual (Prop. 2)", 1.0, below(s.residual["witness"], 0.1), 0.05),
        ("power of alpha in |grad F - grad f| (Prop. 3)", 1.0, below(s.small_adaptation["gradient"], 0.01), 0.05),
        ("power of epsilon in the rounds (Corollary 1)", -1.5, s.rounds["crude"], 0.05),
        ("power of epsilon in the local steps (Corollary 1)", -0.5, s.local_steps, 0.05),
        ("power of epsilon in the trajectories, crude (Corollary 1)", -3.0, s.trajectories["crude"], 0.05),
        ("power of epsilon in the trajectories, sharp (Prop. 1)", -2.5, s.trajectories["sharp"], 0.05),
    ]
    measured = [
        single("theory", what, paper, point(curve.slope), paper - within, paper + within)
        for what, paper, curve, within in slopes
    ]
    pairs = {
        "bias (Lemma 3, Prop. 1)": [(s.bias["nothing"], s.bias[kind]) for kind in ("crude", "sharp")],
        "second moment (Lemma 3)": [(s.second_moment[b], s.second_moment[f"{b}, bound"]) for b in Batches._fields],
        "first-order residual (Prop. 2)": [
            (s.residual[name], s.residual["bound"]) for name in ("witness", "attracting")
        ],
        "client drift (Lemma 4)": [(s.drift[name], s.drift["bound"]) for name in ("way", "apart")],
        "distance of F from f (Prop. 3)": [
            (s.small_adaptation[x], s.small_adaptation[f"{x}, bound"]) for x in ("value", "gradient")
        ],
        "mean squared meta-gradient of runs (Theorem 1)": [
            (s.convergence[x], s.convergence[f"{x}, bound"]) for x in ("tau = 1", "tau = 4")
        ],
    }
    within = [
        everywhere("theory", f"{what} within its bound", np.concatenate([np.ravel(m.y <= b.y) for m, b in found]))
        for what, found in pairs.items()
    ]
    return [
        *measured,
        *within,
        everywhere(
            "theory", "realized constants within their bounds", np.asarray([r.realized <= r.bound for r in s.realized])
        ),
        everywhere(
            "theory", "numbers of the witness that agree in all digits", np.asarray([a.agrees for a in s.witness])
        ),
        everywhere("theory", "listed alphas at which D has a zero (Prop. 2)", np.isfinite(s.residual["witness"].y)),
    ]


def below(curve: Curve, most: float) -> Curve:
    """The part of a curve with x <= most."""
    return Curve(curve.x[curve.x <= most], curve.y[..., curve.x <= most])
