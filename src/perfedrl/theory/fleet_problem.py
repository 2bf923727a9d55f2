"""From a fleet, a policy and an algorithm to what the theory speaks of."""

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
    """An algorithm in the paper's symbols; FedAvg-PG is alpha = 0, where only the outer batch counts."""

    alpha: float
    beta: float
    tau: int
    m_in: int
    m_h: int
    m_out: int
    variant: Variant


def settings(algorithm: Any) -> Settings:
    """The settings of an algorithm that the theory covers."""
    if isinstance(algorithm, PerFedAvgPG):
        a = algorithm
        beyond = {
            "adaptation_steps": a.adaptation_steps > 1,
            "control": a.control != "none",
            "clip": a.clip is not None,
            "learn_alpha": a.learn_alpha != "no",
        }
        if any(beyond.values()):
            named = ", ".join(name for name, used in beyond.items() if used)
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
    """What a plan is for; at another adaptation step size than the algorithm's, where `alpha` is given.

    Where `gap` is not given it is bounded by the mean over agents of the best return there is, less F(theta^0), if
    states are finitely many, and by 2 R-bar otherwise (Lemma 2(i)).
    """
    said = settings(algorithm)
    c = constants(fleet, policy, said.alpha if alpha is None else alpha, radius, reward_bound)
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
    return Problem(c, fleet.agents, size, float(gap), said.variant)


def guarantee(problem: Problem, said: Settings, rounds: int, bias: Bias = "best") -> Bound:
    """Theorem 1 for an algorithm as it is set; refused where its step size is too large for the theorem."""
    return problem.guarantee(rounds, said.tau, said.beta, said.m_in, said.m_h, said.m_out, bias)


def first_parameters(policy: Any, start: int = 0) -> Any:
    """theta^0 as a simulation draws it."""
    return jax.tree.map(np.asarray, policy.init(start_key(start)))


def is_tabular(fleet: Fleet, policy: Any) -> bool:
    """Whether exact quantities are to be had."""
    return isinstance(fleet.train, TabularMDP) and policy.probabilities is not None
