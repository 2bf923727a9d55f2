"""Personal policies held near a shared one by a proximal term, with weights from 0 to infinity.

theta climbs J(theta) - lambda/2 |theta - w|^2, w the anchor. A step is implicit in the proximal term, so that it is
stable at every weight: with the looseness s = 1 / (1 + alpha lambda), 1 at weight 0 and 0 at infinity,

    theta' = s (theta + alpha g(theta)) + (1 - s) w.

What it pulls the anchor with, lambda (theta' - w), is (1 - s) ((theta - w) / alpha + g(theta)): finite at both ends,
nothing at weight 0 and, as theta is w there, the policy gradient g(w) at infinity.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.algorithms.base import ServerState, check_positive, check_step_sizes
from perfedrl.errors import UserError
from perfedrl.types import Array, Params, Scalar


class Near(NamedTuple):
    """An agent's state: its policy, the anchor of its last step, and 1 once it took part, else 0."""

    theta: Params
    anchor: Params
    trained: Float[Array, ""]


def start(params: Params) -> tuple[ServerState, Near]:
    """The server's and an agent's state before the first round."""
    none = jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))
    return ServerState(params), Near(params, params, none)


def looseness(alpha: Any, weight: Any) -> Scalar:
    """Which part of a step is the agent's own: s = 1 / (1 + alpha lambda)."""
    return 1 / (1 + alpha * weight)


def near_step(theta: Params, w: Params, g: Params, alpha: Any, s: Scalar) -> tuple[Params, Params]:
    """A proximal step of theta along a gradient, and the pull on the anchor w after it."""
    moved = jax.tree.map(lambda x, w, g: s * (x + alpha * g) + (1 - s) * w, theta, w, g)
    pull = jax.tree.map(lambda x, w, g: (1 - s) * ((x - w) / alpha + g), theta, w, g)
    return moved, pull


def following(state: Near, w: Params, s: Scalar) -> Params:
    """What an agent's policy is under a new anchor: theta + (1 - s) (w - old anchor), for no trajectories.

    It is where another step would have led with the gradient of the last: to theta at weight 0, and to w at infinity.
    An agent that never took part has w.
    """
    follow = lambda x, old, w: (x - (1 - s) * old) + (1 - s) * w  # noqa: E731
    own = jax.tree.map(follow, state.theta, state.anchor, w)
    return jax.tree.map(lambda x, w: jnp.where(state.trained > 0, x, w), own, w)


def check_proximal(alpha: Any, beta: Any, weight: Any) -> None:
    """Refuse step sizes that are not positive and weights that are no numbers from 0 to infinity."""
    check_step_sizes(alpha, beta)
    check_positive(alpha=alpha)
    if isinstance(weight, int | float) and not weight >= 0:
        raise UserError(f"weight must be a number >= 0, inf included; it is {weight}")
