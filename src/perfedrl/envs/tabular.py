"""Finite MDPs, given as arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from perfedrl.envs.base import Task, check_episode
from perfedrl.envs.inverse_transform import inverse_cdf
from perfedrl.errors import UserError
from perfedrl.memory import Need, TooLargeError, check_host_memory, check_states
from perfedrl.types import Array, Noise

TOLERANCE = 1e-6
"""Largest accepted distance of a distribution's sum from 1; float32 input passes, a forgotten entry does not."""


TABLE_BYTES = 4 * 8
"""Memory per entry of P while an MDP is made: P itself, its normalization and the order of its successors."""
SUCCESSOR_BYTES = 4 + 8
"""Memory per entry of an agent's list of successors: the successor and its probability."""


class TabularMDP(Task):
    """The finite MDP (P[S,A,S], r[S,A], mu[S]) with horizon H and discount gamma, Section 2.1.

    Transitions are stored as lists of possible successors, padded to the longest list. That is lossless, and for a
    deterministic MDP of S states S times smaller than P and free of random numbers. `P` rebuilds the array.
    """

    successor: Int[Array, "*n S A K"]
    probability: Float[Array, "*n S A K"]
    r: Float[Array, "*n S A"]
    mu: Float[Array, "*n S"]
    horizon: int = eqx.field(static=True)
    discount: float = eqx.field(static=True)

    def __init__(self, P, r, mu, horizon: int, discount: float):  # noqa: N803
        P, r, mu = (as_array(name, x) for name, x in (("P", P), ("r", r), ("mu", mu)))
        check(P, r, mu, horizon, discount)
        P, mu = _normalized(P), _normalized(mu)
        self.successor, self.probability = _successor_lists(P)
        self.r, self.mu = r, mu
        self.horizon, self.discount = int(horizon), float(discount)

    @property
    def states(self) -> int:
        """Number of states."""
        return self.r.shape[-2]

    @property
    def actions(self) -> int:
        return self.r.shape[-1]

    @property
    def reward_bound(self) -> float:
        """R_max of Assumption 1, over all agents of a stack."""
        return float(np.abs(self.r).max())

    @property
    def P(self) -> Float[np.ndarray, "*n S A S"]:  # noqa: N802
        """The transition kernel P[s, a, s'] as a dense array, also of a stacked fleet."""
        successor, probability = np.asarray(self.successor), np.asarray(self.probability)
        dense = np.zeros((*self.r.shape, self.states), probability.dtype)
        flat, rows = dense.reshape(-1, self.states), np.arange(self.r.size)[:, None]
        np.add.at(flat, (rows, successor.reshape(-1, successor.shape[-1])), probability.reshape(rows.size, -1))
        return dense

    @property
    def reset_noise(self) -> int:
        return 1

    @property
    def step_noise(self) -> int:
        return int(self.successor.shape[-1] > 1)

    def reset(self, u: Noise) -> Int[Array, ""]:
        return inverse_cdf(jnp.asarray(self.mu), u[0])

    def observe(self, state: Int[Array, ""]) -> Int[Array, ""]:
        return state

    def step(self, state: Int[Array, ""], action: Int[Array, ""], u: Noise):
        k = inverse_cdf(jnp.asarray(self.probability)[state, action], u[0]) if self.step_noise else 0
        return jnp.asarray(self.successor)[state, action, k], jnp.asarray(self.r)[state, action], False

    def backup(self, v: Float[Array, " S"]) -> Float[Array, "S A"]:
        """Return E[v(s') | s, a] for every pair: one application of the transition kernel."""
        return jnp.sum(jnp.asarray(self.probability) * v[self.successor], axis=-1)


def as_array(name: str, x) -> np.ndarray:
    """Convert a user's array to float64."""
    try:
        return np.asarray(x, dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise UserError(f"{name} must be a full array of numbers; got one that is ragged or not numeric") from error


def check(P, r, mu, horizon, discount, agent: int | None = None) -> None:  # noqa: N803
    """Check an MDP's arrays; the error names the first invalid entry."""
    who = "" if agent is None else f"agent {agent}: "
    if P.ndim != 3 or P.shape[0] != P.shape[2]:
        raise UserError(f"{who}P must have shape [S, A, S]; it has shape {list(P.shape)}")
    S, A = P.shape[:2]
    if not S or not A:
        raise UserError(f"{who}an MDP needs at least one state and one action; P has shape {list(P.shape)}")
    for name, x, shape in (("r", r, (S, A)), ("mu", mu, (S,))):
        if x.shape != shape:
            raise UserError(f"{who}{name} must have shape {list(shape)} to fit P; it has shape {list(x.shape)}")
    for name, x in (("P", P), ("r", r), ("mu", mu)):
        if not np.isfinite(x).all():
            raise UserError(f"{who}{name}{_first(~np.isfinite(x))} is {x[~np.isfinite(x)][0]}; it must be finite")
    for name, x in (("P", P), ("mu", mu)):
        if (x < 0).any():
            raise UserError(f"{who}{name}{_first(x < 0)} is {x[x < 0][0]:g}; probabilities must not be negative")
    off = np.abs(P.sum(-1) - 1) > TOLERANCE
    if off.any():
        s, a = np.argwhere(off)[0]
        raise UserError(f"{who}the row of P at state {s}, action {a} sums to {P[s, a].sum():.9g} instead of 1")
    if abs(mu.sum() - 1) > TOLERANCE:
        raise UserError(f"{who}mu sums to {mu.sum():.9g} instead of 1")
    check_episode(horizon, discount, who)


def check_table(states: int, actions: int, settings: str, dense_agents: int = 0) -> None:
    """Reject an MDP whose transition table is too large, before it is made; `settings` make it smaller.

    So many agents keep a table in which every state may follow every other.
    """
    check_states(states)
    try:
        each = TABLE_BYTES + dense_agents * SUCCESSOR_BYTES
        check_host_memory(Need(each * states * actions * states, (states, actions, states)))
    except TooLargeError as error:
        raise UserError(f"{error}; lower {settings}") from error


def _normalized(p: np.ndarray) -> np.ndarray:
    """Normalize distributions to sum 1, so that sampled and exact agents agree.

    Distributions whose sum is 1 to double precision are returned unchanged, bit by bit.
    """
    total = p.sum(axis=-1, keepdims=True)
    return np.where(np.abs(total - 1) > 1e-12, p / total, p)


def _first(where: np.ndarray) -> str:
    return "[" + ", ".join(str(i) for i in np.argwhere(where)[0]) + "]"


def _successor_lists(P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # noqa: N803
    width = int((P > 0).sum(-1).max())
    # A stable sort by "impossible" moves the possible successors to the front and keeps their order.
    order = np.argsort(P <= 0, axis=-1, kind="stable")[..., :width]
    return order.astype(np.int32), np.take_along_axis(P, order, axis=-1)


def widen(mdp: TabularMDP, width: int) -> TabularMDP:
    """Pad the successor lists with impossible successors, so that MDPs of different sparsity can be stacked."""
    pad = [(0, 0), (0, 0), (0, width - mdp.successor.shape[-1])]
    return eqx.tree_at(
        lambda m: (m.successor, m.probability),
        mdp,
        (np.pad(mdp.successor, pad), np.pad(mdp.probability, pad)),
    )


def unstack(mdps: TabularMDP) -> list[TabularMDP]:
    """Split a stacked fleet into its MDPs."""
    return [jax.tree.map(lambda x, i=i: x[i], mdps) for i in range(len(mdps.mu))]
