"""Proximal steps of personal policies around a shared one, for weights from 0 to infinity.

theta climbs J(theta) - lambda/2 |theta - w|^2, w the anchor. A step is implicit in the proximal term, so that it is
stable at every weight: with the looseness s = 1 / (1 + alpha lambda), 1 at weight 0 and 0 at infinity,

    theta' = s (theta + alpha g(theta)) + (1 - s) w.

Its pull on the anchor, lambda (theta' - w), is (1 - s) ((theta - w) / alpha + g(theta)), which is finite at both ends:
0 at weight 0 and the policy gradient g(w) at infinity, where theta is w.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.algorithms.base import ServerState
from perfedrl.algorithms.checks import check_positive, check_step_sizes
from perfedrl.errors import UserError
from perfedrl.types import Array, Params, Scalar


class ProximalState(NamedTuple):
    """An agent's state: its policy, the anchor of its last step, and 1 once it took part, else 0."""

    theta: Params
    anchor: Params
    trained: Float[Array, ""]


def start(params: Params) -> tuple[ServerState, ProximalState]:
    """Return the server's and an agent's state before the first round."""
    none = jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))
    return ServerState(params), ProximalState(params, params, none)


def looseness(alpha: Any, weight: Any) -> Scalar:
    """The looseness s = 1 / (1 + alpha lambda), the agent's own share of a step."""
    return 1 / (1 + alpha * weight)


def near_step(theta: Params, w: Params, g: Params, alpha: Any, s: Scalar) -> tuple[Params, Params]:
    """Take a proximal step of theta along the gradient g; also return its pull on the anchor w."""
    moved = jax.tree.map(lambda x, w, g: s * (x + alpha * g) + (1 - s) * w, theta, w, g)
    pull = jax.tree.map(lambda x, w, g: (1 - s) * ((x - w) / alpha + g), theta, w, g)
    return moved, pull


def following(state: ProximalState, w: Params, s: Scalar) -> Params:
    """Move an agent's policy along with its anchor, without trajectories: theta + (1 - s) (w - old anchor).

    This is the step that the last gradient would have made around the new anchor: theta at weight 0, w at infinity. The
    result is w for an agent that never took part.
    """

    def follow(x: Array, old: Array, w: Array) -> Array:
        return (x - (1 - s) * old) + (1 - s) * w

    own = jax.tree.map(follow, state.theta, state.anchor, w)
    return jax.tree.map(lambda x, w: jnp.where(state.trained > 0, x, w), own, w)


def check_proximal(alpha: Any, beta: Any, weight: Any) -> None:
    """Check that step sizes are positive and that the weight is a number from 0 to infinity."""
    check_step_sizes(alpha, beta)
    check_positive(alpha=alpha)
    if isinstance(weight, int | float) and not weight >= 0:
        raise UserError(f"weight must be a number >= 0, inf included; it is {weight}")
