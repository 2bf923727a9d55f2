"""Translation of a fleet, a policy and an algorithm into the quantities of the theory."""

from typing import Any, NamedTuple

import jax
import numpy as np

from perfedrl import exact
from perfedrl.algorithms import FedAvgPG, PerFedAvgPG
from perfedrl.envs import Fleet, TabularMDP
from perfedrl.envs.tabular import unstack
from perfedrl.errors import UserError
from perfedrl.simulation.keys import start_key
from perfedrl.theory.bounds import Bound, Variant
from perfedrl.theory.plan import Bias, Problem
from perfedrl.theory.worst_case import constants


class Settings(NamedTuple):
    """Settings of an algorithm in the paper's symbols; FedAvg-PG has alpha = 0 and an outer batch only."""

    alpha: float
    beta: float
    tau: int
    m_in: int
    m_h: int
    m_out: int
    variant: Variant


def settings(algorithm: Any) -> Settings:
    """Read the settings of an algorithm; raises `UserError` if the theory does not cover it."""
    if isinstance(algorithm, PerFedAvgPG):
        a = algorithm
        extensions = {
            "adaptation_steps": a.adaptation_steps > 1,
            "control": a.control != "none",
            "clip": a.clip is not None,
            "learn_alpha": a.learn_alpha != "no",
            "optimizer and anneal": a.local_optimizer is not None,
        }
        if any(extensions.values()):
            named = ", ".join(name for name, used in extensions.items() if used)
            raise UserError(f"the theory covers Per-FedAvg-PG as in the paper: leave out {named}")
        variant: Variant = "exact" if a.variant == "exact" else "first-order"
        m_h = a.m_h if variant == "exact" else 0
        return Settings(float(a.alpha), float(a.beta), a.local_steps, a.m_in, m_h, a.m_out, variant)
    if isinstance(algorithm, FedAvgPG):
        return Settings(0.0, float(algorithm.beta), algorithm.local_steps, 0, 0, algorithm.m, "exact")
    raise UserError(f"the theory covers Per-FedAvg-PG and FedAvg-PG, not {type(algorithm).__name__}")


def problem(
    fleet: Fleet,
    policy: Any,
    algorithm: Any,
    *,
    alpha: float | None = None,
    start: int = 0,
    gap: float | None = None,
    radius: float | None = None,
    reward_bound: float | None = None,
) -> Problem:
    """Build the planner's problem; `alpha` overrides the adaptation step size of the algorithm.

    If `gap` is not given it is bounded by the mean optimal return of the agents minus F(theta^0) for tabular fleets,
    and by 2 R-bar otherwise (Lemma 2(i)).
    """
    setup = settings(algorithm)
    c = constants(fleet, policy, setup.alpha if alpha is None else alpha, radius, reward_bound)
    theta = first_parameters(policy, start)
    length = float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(theta))))
    if radius is not None and radius < length:
        raise UserError(f"the radius {radius:g} is too small: parameters start at a distance of {length:.3g} from 0")
    if gap is None:
        gap = 2 * c.R_bar
        if is_tabular(fleet, policy):
            best = np.mean([exact.optimal_return(mdp) for mdp in unstack(fleet.train)])
            gap = max(0.0, float(best - exact.meta_objective(fleet, theta, c.alpha, policy)))
    if not 0 <= gap < float("inf"):
        raise UserError(f"the gap, how far F can rise from where it starts, must be a finite number >= 0; it is {gap}")
    size = sum(x.size for x in jax.tree.leaves(theta))
    return Problem(c, fleet.agents, size, float(gap), setup.variant)


def guarantee(problem: Problem, setup: Settings, rounds: int, bias: Bias = "best") -> Bound:
    """Evaluate Theorem 1 for an algorithm's settings; raises `UserError` if its step size is too large for it."""
    return problem.guarantee(rounds, setup.tau, setup.beta, setup.m_in, setup.m_h, setup.m_out, bias)


def first_parameters(policy: Any, start: int = 0) -> Any:
    """Initial parameters theta^0, as in a simulation."""
    return jax.tree.map(np.asarray, policy.init(start_key(start)))


def is_tabular(fleet: Fleet, policy: Any) -> bool:
    """Whether exact quantities can be computed: a tabular fleet and a table policy."""
    return isinstance(fleet.train, TabularMDP) and policy.probabilities is not None
