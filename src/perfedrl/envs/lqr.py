"""Linear systems with quadratic costs, and the literature's fleet of them (FedLQR, MAML-LQR): docs/lqr.md."""

import numbers
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.envs.base import Task, check_episode
from perfedrl.envs.fleet import Fleet, family_fleet
from perfedrl.envs.inverse_transform import standard_normal
from perfedrl.envs.new_agents import Settings
from perfedrl.envs.variation import Vary, vary_agents
from perfedrl.errors import UserError
from perfedrl.types import Array, Noise, Trajectory

Vector = Float[Array, " n"]

NOMINAL_A = ((1.2, 0.5, 0.4), (0.01, 0.75, 0.3), (0.1, 0.02, 1.5))
SPREAD_A, SPREAD_B = (3.5, 1.0, 0.1), (1.5, 0.1, 1.0)
STATE_COST, INPUT_COST = 2.0, 0.5
"""Wang, Toso, Mitra, Anderson: A_0 (B_0 = I), the diagonals in which systems differ, and Q and R by their diagonals."""

RANGES = {"perturbation": (0.0, 1.0)}


class LinearQuadratic(Task):
    """x' = A x + B u + w with reward -(x^T Q x + u^T R u); x_0 ~ N(0, I) and w ~ N(0, process_noise^2 I).

    The infinite-horizon problem of the literature is truncated after H + 1 decisions; `exact/lqr.py` solves the whole
    problem. Unlike other tasks it may be undiscounted, since a stabilizing gain has a finite cost without discount.
    """

    A: Float[Array, "*agents n n"]
    B: Float[Array, "*agents n m"]
    Q: Float[Array, "*agents n n"]
    R: Float[Array, "*agents m m"]
    horizon: int = eqx.field(static=True)
    discount: float = eqx.field(static=True)
    process_noise: float = eqx.field(static=True)

    def __init__(self, A, B, Q, R, horizon: int = 14, discount: float = 1.0, process_noise: float = 0.0):  # noqa: N803
        self.A, self.B, self.Q, self.R = (np.asarray(x, float) for x in (A, B, Q, R))
        check(self.A, self.B, self.Q, self.R)
        check_episode(horizon, 0.0)
        if not 0 < discount <= 1:
            raise UserError(f"the discount of a linear system must lie in (0, 1]; it is {discount}")
        if not 0 <= process_noise < float("inf"):
            raise UserError(f"process_noise must be a finite number >= 0; it is {process_noise}")
        self.horizon, self.discount, self.process_noise = int(horizon), float(discount), float(process_noise)

    @property
    def state_size(self) -> int:
        return self.A.shape[-1]

    @property
    def action_size(self) -> int:
        return self.B.shape[-1]

    @property
    def reset_noise(self) -> int:
        return self.state_size

    @property
    def step_noise(self) -> int:
        return self.state_size if self.process_noise else 0

    def reset(self, u: Noise) -> Vector:
        return standard_normal(u)

    def observe(self, state: Vector) -> Vector:
        return state

    def step(self, state: Vector, action: Float[Array, " m"], u: Noise) -> tuple[Vector, Float[Array, ""], bool]:
        A, B, Q, R = (jnp.asarray(x, state.dtype) for x in (self.A, self.B, self.Q, self.R))
        cost = jnp.sum(state * times(Q, state)) + jnp.sum(action * times(R, action))
        after = times(A, state) + times(B, action)
        return (after + self.process_noise * standard_normal(u) if self.process_noise else after), -cost, False

    def outcomes(self, episode: Trajectory) -> dict[str, Float[Array, ""]]:
        """The undiscounted return, and the distance from the origin at the last decision."""
        last = jnp.sqrt(jnp.sum(episode.obs[-1] ** 2))
        return {"score": jnp.sum(episode.reward * episode.mask), "distance": last}


def times(matrix: Float[Array, "k n"], x: Vector) -> Float[Array, " k"]:
    """Multiply a matrix and a vector; by sums on GPUs, whose matrix products round to ten bits."""
    return matrix @ x if jax.default_backend() == "cpu" else jnp.sum(matrix * x, axis=-1)


def lqr(
    agents: int = 10,
    held_out: int = 10,
    seed: int = 0,
    epsilon: float = 0.1,
    input_epsilon: float | None = None,
    vary: Vary = "perturbation",
    horizon: int = 14,
    discount: float = 1.0,
    process_noise: float = 0.0,
) -> Fleet:
    """The literature's systems: A_i = A_0 + epsilon u_i V and B_i = I + epsilon u_i U with Q = 2 I and R = I / 2.

    u_i ~ U[0, 1] is the agent's `perturbation`. Both matrices vary together, as in the code of FedLQR: then the usual
    initial gain 1.62 I stabilizes every system for epsilon up to 0.5. It does not where A varies alone
    (`input_epsilon = 0`).
    """
    for name, value in (("epsilon", epsilon), ("input_epsilon", input_epsilon or 0.0)):
        if not 0 <= value < float("inf"):
            raise UserError(f"lqr: {name} must be a finite number >= 0; it is {value}")
    split = vary_agents(vary, agents, held_out, seed, known=RANGES, ranges=RANGES)

    def system(_: Any, settings: Settings) -> LinearQuadratic:
        u, both = settings.get("perturbation", 0.0), epsilon if input_epsilon is None else input_epsilon
        if not isinstance(u, numbers.Real):
            raise UserError(f"the perturbation must be a number; it is {u!r}")
        A = np.asarray(NOMINAL_A) + epsilon * u * np.diag(SPREAD_A)
        B = np.eye(3) + both * u * np.diag(SPREAD_B)
        return LinearQuadratic(A, B, STATE_COST * np.eye(3), INPUT_COST * np.eye(3), horizon, discount, process_noise)

    return family_fleet(system, split.train, split.held_out)


def check(A: np.ndarray, B: np.ndarray, Q: np.ndarray, R: np.ndarray) -> None:  # noqa: N803
    """Check the matrices of one system: shapes, finite entries, definiteness."""
    n, m = B.shape if B.ndim == 2 else (0, 0)
    for name, x, shape in (("A", A, (n, n)), ("B", B, (n, m)), ("Q", Q, (n, n)), ("R", R, (m, m))):
        if x.shape != shape or not x.size:
            raise UserError(f"a linear system needs A[n,n], B[n,m], Q[n,n] and R[m,m]; {name} has shape {x.shape}")
        if not np.isfinite(x).all():
            raise UserError(f"{name} must hold finite numbers")
    for name, x, least in (("Q", Q, ">= 0"), ("R", R, "> 0")):
        symmetric = np.array_equal(x, x.T)
        lowest = float(np.linalg.eigvalsh(x)[0]) if symmetric else float("nan")
        if not (lowest > 0 or (name == "Q" and lowest >= 0)):
            raise UserError(f"{name} must be symmetric with eigenvalues {least}; it is {x.tolist()}")
