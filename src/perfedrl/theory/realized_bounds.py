"""Worst-case bounds compared with the values that a tabular fleet realizes along a training run."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from perfedrl import exact
from perfedrl.compilation import jit
from perfedrl.envs import Fleet
from perfedrl.envs.tabular import unstack
from perfedrl.errors import UserError
from perfedrl.theory import bounds
from perfedrl.theory.estimate import Batches, EstimateMoments, moments
from perfedrl.theory.fleet_problem import guarantee, is_tabular, settings
from perfedrl.theory.local_step_trace import Trace, trace
from perfedrl.theory.plan import Problem
from perfedrl.types import Params, Progress

ROUNDS, MEASURED_ROUNDS, HESSIAN_ROUNDS, SAMPLED_ROUNDS = 40, 12, 4, 3
"""Rounds to run, and numbers of evenly spaced rounds to measure, to compute Hessians of F in, and to sample in."""


class RealizedBound(NamedTuple):
    """A bound of the paper and the largest value of the bounded quantity along a run."""

    what: str
    symbol: str
    where: str
    bound: float
    realized: float

    @property
    def looseness(self) -> float:
        """Ratio of the bound to the realized value."""
        return self.bound / self.realized if self.realized else float("inf")


def realized(
    problem: Problem,
    fleet: Fleet,
    policy: Any,
    algorithm: Any,
    rounds: int = ROUNDS,
    seed: int = 0,
    start: int = 0,
    progress: Progress = lambda _: None,
) -> list[RealizedBound]:
    """Compare every bound with its largest realized value over agents and over the parameters that a run visits."""
    if not is_tabular(fleet, policy):
        raise UserError("realized constants need agents with finitely many states (a fleet of TabularMDP)")
    progress("running")
    run = trace(fleet, policy, algorithm, rounds, seed, start)
    measured = evenly(rounds, MEASURED_ROUNDS)
    progress("gradients and Hessians")
    rows = regularity_rows(problem, fleet, policy, run, measured)
    progress("batches")
    setup = settings(algorithm)
    sizes = Batches(max(setup.m_in, 1), max(setup.m_h, 1), setup.m_out)
    points = [jax.tree.map(lambda x, k=k: x[k], run.server) for k in evenly(rounds, SAMPLED_ROUNDS)]
    at = [
        moments(mdp, policy, theta, setup.alpha, sizes, setup.variant)
        for theta in points
        for mdp in unstack(fleet.train)
    ]
    return [*rows, *estimator_rows(problem, setup, at), *run_rows(problem, fleet, policy, setup, run)]


def regularity_rows(
    problem: Problem, fleet: Fleet, policy: Any, run: Trace, measured: np.ndarray
) -> list[RealizedBound]:
    """Compare the bounds of Lemmas 1 and 2, Remark 1 and Prop. 3."""
    c, far = problem.constants, bounds.small_adaptation(problem.constants)
    visited = jax.tree.map(lambda x: x[measured].reshape(-1, *x.shape[2:]), run.params)
    curved = jax.tree.map(lambda x: x[evenly(run.rounds, HESSIAN_ROUNDS), -1], run.params)
    server = jax.tree.map(lambda x: x[measured], run.server)
    J, gradient, hessian, change, F, meta = _visited(policy, fleet.train, visited, c.alpha)
    (meta_hessian,) = _curved(policy, fleet.train, curved, c.alpha)
    apart, gradient_gap, value_gap = _shared(policy, fleet.train, server, c.alpha)
    shown = [
        ("return |J_i|", "R̄", "Lemma 1(i)", c.R_bar, max(J, F)),
        ("gradient |∇J_i|", "G_J", "Lemma 1(ii)", c.G_J, gradient),
        ("Hessian |∇²J_i|", "L_J", "Lemma 1(iii)", c.L_J, hessian),
        ("change of the Hessian", "ρ_J", "Lemma 1(iv)", c.rho_J, change),
        ("meta-gradient |∇F_i|", "G_F", "Lemma 2(ii)", c.G_F, meta),
        ("meta-Hessian |∇²F_i|", "L_F", "Lemma 2(iii)", c.L_F, meta_hessian),
        ("gradient dissimilarity", "G_J²", "Remark 1", bounds.dissimilarity(c), apart),
    ]
    if c.alpha:
        shown += [
            ("distance |∇F − ∇f|", "2αL_J G_J", "Prop. 3", far.gradient, gradient_gap),
            ("distance |F − f|", "αG_J²", "Prop. 3", far.value, value_gap),
        ]
    return [RealizedBound(*row[:3], float(row[3]), float(row[4])) for row in shown]


def estimator_rows(problem: Problem, setup: Any, at: list[EstimateMoments]) -> list[RealizedBound]:
    """Compare Lemma 3 and Prop. 1 (at the realized variance), or Corollary 2 for the first-order variant."""
    c = problem.constants
    how = "" if all(x.enumerated for x in at) else ", sampled"
    variance, bias, second = (max(getattr(x, name) for x in at) for name in ("variance", "bias", "second_moment"))
    names = ("Lemma 3(ii)", "Lemma 3(iii)") if setup.variant == "exact" else ("Corollary 2", "Corollary 2")
    second_bound = problem.second_moment(setup.m_in, setup.m_h, setup.m_out)
    rows = [RealizedBound(f"variance of one gradient{how}", "G_J²", "Prop. 1", c.G_J**2, variance)]
    if c.alpha:
        sharp = bounds.sharp_bias(c, setup.m_in, setup.variant, variance)
        rows += [
            RealizedBound(f"bias{how}", "b̂", names[0], problem.bias(setup.m_in, "crude"), bias),
            RealizedBound(f"bias, sharp bound{how}", "b̂*", "Prop. 1, own var.", sharp, bias),
        ]
    return [*rows, RealizedBound(f"mean squared error{how}", "σ̂²", names[1], second_bound, second)]


def run_rows(problem: Problem, fleet: Fleet, policy: Any, setup: Any, run: Trace) -> list[RealizedBound]:
    """Compare Lemma 4 and, if its condition on beta holds, Theorem 1."""
    c, tau = problem.constants, setup.tau
    from_start, apart = drifts(run)
    rows = [
        RealizedBound(
            "distance moved in a round", "βτG_F", "Lemma 4(i)", bounds.drift(c, setup.beta, tau), from_start[-1]
        ),
        RealizedBound(
            "squared client drift", "(βτG_F)²", "Lemma 4(ii)", bounds.drift(c, setup.beta, tau) ** 2, apart[-1]
        ),
    ]
    if setup.beta <= bounds.ceiling(c):
        squares = squared_meta_gradients(fleet, policy, run, c.alpha)
        bound = guarantee(problem, setup, run.rounds).total
        rows.append(RealizedBound("mean squared meta-gradient", "Theorem 1", "eq. (8)", bound, float(squares.mean())))
    return rows


def drifts(run: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Measure the drift at every local step t = 0 .. tau, as the maximum over rounds.

    Returns the largest distance of an agent from the start of the round, and the mean squared distance of agents from
    their average.
    """
    flat = flattened(run.params)
    moved = np.linalg.norm(flat - flat[:, :1], axis=-1)
    apart = ((flat - flat.mean(axis=2, keepdims=True)) ** 2).sum(axis=-1).mean(axis=2)
    return moved.max(axis=(0, 2)), apart.max(axis=0)


def squared_meta_gradients(fleet: Fleet, policy: Any, run: Trace, alpha: float) -> np.ndarray:
    """Compute |grad F|^2 at the virtual averages of Theorem 1, [round, local step t = 0 .. tau - 1]."""
    points = jax.tree.map(lambda x: x[:, :-1].reshape(-1, *x.shape[2:]), run.mean)
    return _squared(policy, fleet.train, points, alpha).reshape(run.rounds, -1)


def flattened(params: Params) -> np.ndarray:
    """Flatten parameters [round, step, agent, ...] to vectors in double precision."""
    leaves = [np.asarray(x, np.float64).reshape(*x.shape[:3], -1) for x in jax.tree.leaves(params)]
    return np.concatenate(leaves, axis=-1)


def evenly(count: int, most: int) -> np.ndarray:
    """At most `most` evenly spaced indices from 0 to count - 1."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _each(f, policy, mdps, points):
    """Apply a function of one agent to every point that the agent visited, [point, agent, ...]."""
    return jax.lax.map(lambda theta: jax.vmap(lambda mdp, x: f(policy, mdp, x))(mdps, theta), points)


def _spectral(matrices):
    """Spectral norm of symmetric matrices."""
    return jnp.abs(jnp.linalg.eigvalsh(matrices)).max(axis=-1)


def _flat(f, theta):
    """Turn a function of parameters into one of a vector; returns it with the flattened parameters."""
    flat, unravel = ravel_pytree(theta)
    return lambda x: f(unravel(x)), flat


@exact.float64
@jit
def _visited(policy, mdps, points, alpha):
    def one(policy, mdp, theta):
        J, x = _flat(partial(exact.J, policy, mdp), theta)
        F, _ = _flat(lambda t: exact.F(policy, mdp, t, alpha), theta)
        value, meta = jax.value_and_grad(F)(x)
        return J(x), jnp.linalg.norm(jax.grad(J)(x)), jax.hessian(J)(x), value, jnp.linalg.norm(meta), x

    J, gradient, H, F, meta, x = _each(one, policy, mdps, points)
    length = jnp.linalg.norm(x[1:] - x[:-1], axis=-1)
    change = jnp.where(length > 0, _spectral(H[1:] - H[:-1]) / jnp.where(length > 0, length, 1), 0)
    return abs(J).max(), gradient.max(), _spectral(H).max(), change.max(), abs(F).max(), meta.max()


@exact.float64
@jit
def _curved(policy, mdps, points, alpha):
    def one(policy, mdp, theta):
        F, x = _flat(lambda t: exact.F(policy, mdp, t, alpha), theta)
        return _spectral(jax.hessian(F)(x))

    return (_each(one, policy, mdps, points).max(),)


@exact.float64
@jit
def _shared(policy, mdps, points, alpha):
    def one(theta):
        def agent(mdp):
            J, x = _flat(partial(exact.J, policy, mdp), theta)
            F, _ = _flat(lambda t: exact.F(policy, mdp, t, alpha), theta)
            return J(x), F(x), jax.grad(J)(x), jax.grad(F)(x)

        J, F, dJ, dF = jax.vmap(agent)(mdps)
        apart = jnp.sum((dJ - dJ.mean(axis=0)) ** 2, axis=1).mean()
        return apart, jnp.linalg.norm(dF.mean(axis=0) - dJ.mean(axis=0)), abs(F.mean() - J.mean())

    return tuple(x.max() for x in jax.lax.map(one, points))


@exact.float64
@jit
def _squared(policy, mdps, points, alpha):
    def one(theta):
        def mean(t):
            return jnp.mean(jax.vmap(lambda mdp: exact.F(policy, mdp, t, alpha))(mdps))

        F, x = _flat(mean, theta)
        return jnp.sum(jax.grad(F)(x) ** 2)

    return jax.lax.map(one, points, batch_size=256)
