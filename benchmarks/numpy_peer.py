"""A plain NumPy implementation of the three methods on finite MDPs: the benchmark's peer and an oracle for tests.

Vectorized over the trajectories of a batch, looped over agents, rounds and local steps. Like the library it serves any
finite MDP, draws actions and next states by inverse CDF, and never forms a matrix of parameters by parameters. It
shares no code with the library: gradients are written out by hand for the softmax table.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Uniforms = Callable[[int, int, int, str, int], np.ndarray]
"""(round, agent, local step, batch, m) -> uniforms [m, T, 3]: start (first step only), action, next state."""


class Mdp(NamedTuple):
    """Cumulative transition rows [S, A, S], rewards [S, A], cumulative start distribution [S]."""

    cdf: np.ndarray
    r: np.ndarray
    mu: np.ndarray
    horizon: int
    discount: float


def mdp(P: np.ndarray, r: np.ndarray, mu: np.ndarray, horizon: int, discount: float) -> Mdp:
    """Prepare an MDP for sampling."""
    return Mdp(np.cumsum(P, axis=-1), r, np.cumsum(mu), horizon, discount)


def softmax(theta: np.ndarray) -> np.ndarray:
    e = np.exp(theta - theta.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def rollout(pi: np.ndarray, agent: Mdp, u: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States, actions and rewards-to-go, each [T, m]."""
    m, T = u.shape[:2]
    policy = np.cumsum(pi, axis=1)[:, :-1]
    states, actions = np.empty((T, m), dtype=np.int64), np.empty((T, m), dtype=np.int64)
    s = (u[:, 0, :1] >= agent.mu[:-1]).sum(axis=1)
    for t in range(T):
        a = (u[:, t, 1:2] >= policy[s]).sum(axis=1)
        states[t], actions[t] = s, a
        s = (u[:, t, 2:] >= agent.cdf[s, a, :-1]).sum(axis=1)
    rewards = agent.r[states, actions] * agent.discount ** np.arange(T)[:, None]
    return states, actions, np.cumsum(rewards[::-1], axis=0)[::-1]


def weighted_scores(pi: np.ndarray, states, actions, weights) -> np.ndarray:
    """The mean over trajectories of sum_h weights_h grad log pi(a_h|s_h)."""
    S, A = pi.shape
    table = np.bincount((states * A + actions).ravel(), weights.ravel(), S * A).reshape(S, A) / weights.shape[1]
    return table - table.sum(axis=1, keepdims=True) * pi


def gradient(theta: np.ndarray, agent: Mdp, u: np.ndarray) -> np.ndarray:
    """The reward-to-go policy gradient, eq. (2)."""
    pi = softmax(theta)
    return weighted_scores(pi, *rollout(pi, agent, u))


def curvature(theta: np.ndarray, agent: Mdp, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The score-function Hessian times v, eq. (3)."""
    pi = softmax(theta)
    states, actions, R = rollout(pi, agent, u)
    centred = v - (pi * v).sum(axis=1, keepdims=True)
    trajectory_score = centred[states, actions].sum(axis=0)
    visits = np.bincount(states.ravel(), R.ravel(), len(pi)) / R.shape[1]
    return weighted_scores(pi, states, actions, R * trajectory_score) - visits[:, None] * pi * centred


def train(
    agents: Sequence[Mdp],
    variant: str,
    uniforms: Uniforms,
    *,
    alpha: float,
    beta: float,
    rounds: int,
    local_steps: int,
    m: int,
) -> np.ndarray:
    """Algorithm 1 from the uniform policy: "exact", "first-order" with batches of m, "fedavg-pg" with 3 m."""
    theta = np.zeros(agents[0].r.shape)
    for k in range(rounds):
        uploads = []
        for i, agent in enumerate(agents):
            x = theta
            for t in range(local_steps):
                if variant == "fedavg-pg":
                    direction = gradient(x, agent, uniforms(k, i, t, "outer", 3 * m))
                else:
                    adapted = x + alpha * gradient(x, agent, uniforms(k, i, t, "inner", m))
                    direction = gradient(adapted, agent, uniforms(k, i, t, "outer", m))
                    if variant == "exact":
                        u = uniforms(k, i, t, "curvature", m)
                        direction = direction + alpha * curvature(x, agent, u, direction)
                x = x + beta * direction
            uploads.append(x)
        theta = np.mean(uploads, axis=0)
    return theta
