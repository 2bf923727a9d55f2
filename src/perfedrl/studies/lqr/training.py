"""Training on exact linear-quadratic costs, with a stability check of every gain along the way."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from perfedrl.algorithms import PerFedAvgPG
from perfedrl.compilation import jit
from perfedrl.envs import Fleet, LinearQuadratic
from perfedrl.errors import UserError
from perfedrl.exact.lqr import C, ExactLQRObjective, check_stable, check_start, is_lqr, system, systems
from perfedrl.exact.tabular import Exact, float64
from perfedrl.theory.local_step_trace import trace


class Descent(NamedTuple):
    """The gains K^0 .. K^rounds that the server broadcast, and the one it would broadcast next."""

    gains: Float[np.ndarray, "round m n"]

    @property
    def last(self) -> Float[np.ndarray, "m n"]:
        return self.gains[-1]


def descend(fleet: Fleet, policy: Any, algorithm: Any, rounds: int) -> Descent:
    """Run rounds of Per-FedAvg-PG or FedAvg-PG on exact costs, compiled, in float64.

    Every agent must be stable under each of its gains: the one it receives, the one after each local step and, where
    it adapts, the adapted one. The first unstable gain is an error that names agent, round and step.
    """
    if not is_lqr(fleet, policy):
        raise UserError("exact LQR training needs a fleet of linear-quadratic agents and a linear policy")
    check_start(fleet, policy)
    run = float64(trace)(fleet, policy, algorithm, rounds, agent=Exact(policy))
    gains = np.asarray(run.params["gain"])
    # FedAvg-PG's alpha is for deployment only.
    alpha = float(algorithm.alpha) if isinstance(algorithm, PerFedAvgPG) else 0.0
    last = gains[-1, -1].mean(axis=0)
    check_all_stable(fleet, gains, float64(_adapted)(fleet.train, gains, alpha))
    check_stable(systems(fleet), last, f"after {rounds} rounds, lower the step size")
    return Descent(np.concatenate([gains[:, 0, 0], last[None]]))


Gains = Float[np.ndarray, "round step agent m n"]


def check_all_stable(fleet: Fleet, gains: Gains, adapted: Gains) -> None:
    """Raise a `UserError` for the first gain that does not stabilize its system, with agent, round, step and radius."""
    own, after = spectral_radii(fleet, gains), spectral_radii(fleet, adapted)
    both = np.stack([own, after], axis=2)  # in temporal order: a step begins at a gain, then adapts it
    both[:, -1, 1] = 0.0  # the last gain of a round is not adapted
    bad = np.argwhere(~(both < 1))
    if len(bad):
        k, t, kind, i = (int(x) for x in bad[0])
        raise UserError(
            f"the {('gain', 'adapted gain')[kind]} of agent {i} does not stabilize its system in round {k} at local "
            f"step {t}: its closed loop has spectral radius {both[k, t, kind, i]:.4g}; lower the step size"
        )


def spectral_radii(fleet: Fleet, gains: Gains) -> Float[np.ndarray, "round step agent"]:
    """Spectral radii of A_i - B_i K; nan where a gain is not finite."""
    every = [system(task) for task in systems(fleet)]
    A, B = np.stack([s.A for s in every]), np.stack([s.B for s in every])
    finite = np.isfinite(gains).all(axis=(-2, -1))
    closed = A - B @ np.where(finite[..., None, None], gains, 0.0)
    return np.where(finite, np.abs(np.linalg.eigvals(closed)).max(axis=-1), np.nan)


def costs(tasks: LinearQuadratic, gains: Float[np.ndarray, "x m n"], eta: float) -> Float[np.ndarray, "x agent"]:
    """C_i(K - eta grad C_i(K)) for a stack of systems and many gains; infinite where a system becomes unstable."""
    found = float64(_costs)(tasks, gains, eta)
    return np.where(np.isnan(found), np.inf, found)


@jit
def _costs(tasks: Any, gains: Any, eta: Any) -> Any:
    def one(gain: Any) -> Any:
        return jax.vmap(lambda task: C(task, _own(task, gain, eta)))(tasks)

    return jax.vmap(one)(gains)


@jit
def _adapted(tasks: Any, gains: Any, alpha: Any) -> Any:
    """K + alpha grad J_i(K), for gains [round, step, agent, m, n]."""
    own = jax.vmap(lambda task, gain: _own(task, gain, alpha))
    return jax.vmap(jax.vmap(own, in_axes=(None, 0)), in_axes=(None, 0))(tasks, gains)


def _own(task: LinearQuadratic, gain: Any, alpha: Any) -> Any:
    """The gain after one exact step on one system."""
    return gain + alpha * ExactLQRObjective(task).gradient({"gain": gain})["gain"]
