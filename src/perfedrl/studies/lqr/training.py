"""Training on exact linear-quadratic costs, with the stability of every gain on the way checked."""

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
    """K^0 .. K^rounds, what the server broadcast and would broadcast next."""

    gains: Float[np.ndarray, "round m n"]

    @property
    def last(self) -> Float[np.ndarray, "m n"]:
        return self.gains[-1]


def descend(fleet: Fleet, policy: Any, algorithm: Any, rounds: int) -> Descent:
    """Rounds of Per-FedAvg-PG or FedAvg-PG on exact costs, compiled, in float64.

    Every agent must be stable under every gain that it works with: what it was sent, the end of each local step, and
    where it adapts, the adapted gain. The first for which that fails is an error that names it.
    """
    if not is_lqr(fleet, policy):
        raise UserError("exact LQR training needs a fleet of linear-quadratic agents and a linear policy")
    check_start(fleet, policy)
    run = float64(trace)(fleet, policy, algorithm, rounds, agent=Exact(policy))
    gains = np.asarray(run.params["gain"])
    # FedAvg-PG has an alpha, but does not train with it.
    alpha = float(algorithm.alpha) if isinstance(algorithm, PerFedAvgPG) else 0.0
    last = gains[-1, -1].mean(axis=0)
    refuse_unstable(fleet, gains, float64(_adapted)(fleet.train, gains, alpha))
    check_stable(systems(fleet), last, f"after {rounds} rounds, lower the step size")
    return Descent(np.concatenate([gains[:, 0, 0], last[None]]))


Gains = Float[np.ndarray, "round step agent m n"]


def refuse_unstable(fleet: Fleet, gains: Gains, adapted: Gains) -> None:
    """Refuse a run in which an agent's gain does not stabilize its system, and say which, when and by how much."""
    own, after = spectral_radii(fleet, gains), spectral_radii(fleet, adapted)
    both = np.stack([own, after], axis=2)  # in the order of time: a step begins at a gain, and adapts it
    both[:, -1, 1] = 0.0  # nobody adapts the gain that a round ends with
    bad = np.argwhere(~(both < 1))
    if len(bad):
        k, t, kind, i = (int(x) for x in bad[0])
        raise UserError(
            f"the {('gain', 'adapted gain')[kind]} of agent {i} does not stabilize its system in round {k} at local "
            f"step {t}: its closed loop has spectral radius {both[k, t, kind, i]:.4g}; lower the step size"
        )


def spectral_radii(fleet: Fleet, gains: Gains) -> Float[np.ndarray, "round step agent"]:
    """rho(A_i - B_i K), nan where a gain is not finite."""
    every = [system(task) for task in systems(fleet)]
    A, B = np.stack([s.A for s in every]), np.stack([s.B for s in every])
    finite = np.isfinite(gains).all(axis=(-2, -1))
    closed = A - B @ np.where(finite[..., None, None], gains, 0.0)
    return np.where(finite, np.abs(np.linalg.eigvals(closed)).max(axis=-1), np.nan)


def costs(tasks: LinearQuadratic, gains: Float[np.ndarray, "x m n"], eta: float) -> Float[np.ndarray, "x agent"]:
    """C_i(K - eta grad C_i(K)) of a stack of systems for many gains; infinite where a system becomes unstable."""
    found = float64(_costs)(tasks, gains, eta)
    return np.where(np.isnan(found), np.inf, found)


@jit
def _costs(tasks: Any, gains: Any, eta: Any) -> Any:
    one = lambda gain: jax.vmap(lambda task: C(task, _own(task, gain, eta)))(tasks)  # noqa: E731
    return jax.vmap(one)(gains)


@jit
def _adapted(tasks: Any, gains: Any, alpha: Any) -> Any:
    """K + alpha grad J_i(K), for gains [round, step, agent, m, n]."""
    own = jax.vmap(lambda task, gain: _own(task, gain, alpha))
    return jax.vmap(jax.vmap(own, in_axes=(None, 0)), in_axes=(None, 0))(tasks, gains)


def _own(task: LinearQuadratic, gain: Any, alpha: Any) -> Any:
    return gain + alpha * ExactLQRObjective(task).gradient({"gain": gain})["gain"]
