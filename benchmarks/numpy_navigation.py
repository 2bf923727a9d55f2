"""A plain NumPy implementation of Per-FedAvg-PG on the navigation family: the benchmark's peer and an oracle for tests.

Vectorized over the trajectories of a batch, looped over agents, rounds, local steps and the steps of an episode. The
gradient and the Hessian-vector product of the two-layer tanh network are written out by hand (the latter by carrying a
directional derivative through both passes), so no matrix of parameters by parameters is ever formed. It shares no code
with the library.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Uniforms = Callable[[int, int, int, str, int], np.ndarray]
"""(round, agent, local step, batch, m) -> uniforms [m, 2 + T]: start position, then one per decision."""

HORIZON, DISCOUNT, RADIUS, STEP, ACTIONS = 20, 0.9, 0.2, 0.15, 8
ANGLES = 2 * np.pi * np.arange(ACTIONS) / ACTIONS
MOVES = STEP * np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)


class Net(NamedTuple):
    """Weights and biases of the two layers; also gradients and directions."""

    W1: np.ndarray
    b1: np.ndarray
    W2: np.ndarray
    b2: np.ndarray

    def plus(self, scale: float, other: "Net") -> "Net":
        return Net(*(x + scale * y for x, y in zip(self, other, strict=True)))


class Batch(NamedTuple):
    """Positions [T, m, 2], actions [T, m], rewards-to-go [T, m]."""

    x: np.ndarray
    a: np.ndarray
    R: np.ndarray


def forward(net: Net, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden activations and action probabilities."""
    h = np.tanh(x @ net.W1 + net.b1)
    o = h @ net.W2 + net.b2
    e = np.exp(o - o.max(axis=-1, keepdims=True))
    return h, e / e.sum(axis=-1, keepdims=True)


def rollout(net: Net, goal: np.ndarray, u: np.ndarray) -> Batch:
    m, T = len(u), u.shape[1] - 2
    xs, actions, rewards = np.empty((T, m, 2)), np.empty((T, m), dtype=np.int64), np.empty((T, m))
    x = 2 * u[:, :2] - 1
    for t in range(T):
        cdf = np.cumsum(forward(net, x)[1], axis=1)
        a = (u[:, 2 + t, None] * cdf[:, -1:] >= cdf[:, :-1]).sum(axis=1)
        xs[t], actions[t] = x, a
        rewards[t] = np.linalg.norm(x - goal, axis=1) <= RADIUS
        x = np.clip(x + MOVES[a], -1, 1)
    rewards *= DISCOUNT ** np.arange(T)[:, None]
    return Batch(xs, actions, np.cumsum(rewards[::-1], axis=0)[::-1])


def flat(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Positions of all decisions, and their actions as rows of the identity."""
    return batch.x.reshape(-1, 2), np.eye(ACTIONS)[batch.a.ravel()]


def gradient(net: Net, goal: np.ndarray, u: np.ndarray) -> Net:
    """The reward-to-go policy gradient, eq. (2)."""
    batch = rollout(net, goal, u)
    x, taken = flat(batch)
    h, p = forward(net, x)
    do = batch.R.reshape(-1, 1) * (taken - p) / len(u)
    dz = (do @ net.W2.T) * (1 - h**2)
    return Net(x.T @ dz, dz.sum(axis=0), h.T @ do, do.sum(axis=0))


def curvature(net: Net, goal: np.ndarray, u: np.ndarray, v: Net) -> Net:
    """The score-function Hessian times v, eq. (3)."""
    batch = rollout(net, goal, u)
    x, taken = flat(batch)
    h, p = forward(net, x)
    slope = 1 - h**2
    Rh = slope * (x @ v.W1 + v.b1)
    Ro = Rh @ net.W2 + h @ v.W2 + v.b2
    along = Ro - (p * Ro).sum(axis=1, keepdims=True)
    y = (taken * along).sum(axis=1).reshape(batch.R.shape)
    w = batch.R / len(u)
    do = w.reshape(-1, 1) * (taken - p)
    total = (w * y.sum(axis=0)).reshape(-1, 1) * (taken - p) - w.reshape(-1, 1) * (p * along)
    dz = (total @ net.W2.T + do @ v.W2.T) * slope - 2 * (do @ net.W2.T) * h * Rh
    return Net(x.T @ dz, dz.sum(axis=0), h.T @ total + Rh.T @ do, total.sum(axis=0))


def local_step(net: Net, goal: np.ndarray, draw: Callable[[str, int], np.ndarray], **how) -> Net:
    """One ascent step along the estimated meta-gradient; m_h = 0 is the first-order variant."""
    adapted = net.plus(how["alpha"], gradient(net, goal, draw("inner", how["m_in"])))
    direction = gradient(adapted, goal, draw("outer", how["m_out"]))
    if how["m_h"]:
        direction = direction.plus(how["alpha"], curvature(net, goal, draw("curvature", how["m_h"]), direction))
    return net.plus(how["beta"], direction)


def train(
    net: Net, goals: Sequence[np.ndarray], uniforms: Uniforms, *, rounds: int, local_steps: int, **how: float
) -> Net:
    """Algorithm 1 from given start parameters."""
    for k in range(rounds):
        uploads = []
        for i, goal in enumerate(goals):
            own = net
            for t in range(local_steps):
                own = local_step(own, goal, lambda batch, m, k=k, i=i, t=t: uniforms(k, i, t, batch, m), **how)
            uploads.append(own)
        net = Net(*(np.mean(leaves, axis=0) for leaves in zip(*uploads, strict=True)))
    return net
