"""Navigation in the plane: agents differ in their goal.

There are two kinds. `Navigation` is the paper's neural family: compass moves in a box, and a reward near the goal. In
`PointNavigation`, the classic of the meta-RL literature, actions are velocities and the reward is minus the distance.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from perfedrl.envs.base import Task, check_episode
from perfedrl.envs.fleet import Fleet, fleet
from perfedrl.errors import UserError
from perfedrl.types import Array, Noise, Trajectory

Position = Float[Array, " 2"]
Point = tuple[float, float]


class Navigation(Task):
    """Steps of fixed length in evenly spaced directions, clipped to the box; reward 1 at every step near the goal.

    The start is uniform over the box, the episode does not end at the goal, and the reward is that of the position
    before the move (Appendix C.1).
    """

    goal: Float[Array, "*n 2"]
    horizon: int = eqx.field(static=True, default=20)
    discount: float = eqx.field(static=True, default=0.9)
    radius: float = eqx.field(static=True, default=0.2)
    step_size: float = eqx.field(static=True, default=0.15)
    box: float = eqx.field(static=True, default=1.0)
    actions: int = eqx.field(static=True, default=8)

    reset_noise = 2
    step_noise = 0
    reward_bound = 1.0

    @property
    def observation_bound(self) -> float:
        """The largest norm of an observation: a corner of the box."""
        return float(np.sqrt(2) * self.box)

    def __check_init__(self) -> None:
        check_episode(self.horizon, self.discount)
        check_positive(radius=self.radius, step_size=self.step_size, box=self.box)
        if self.actions < 2:
            raise UserError(f"navigation needs at least two directions; actions is {self.actions}")
        check_goal(self.goal, self.box)

    def reset(self, u: Noise) -> Position:
        return self.box * (2 * u - 1)

    def observe(self, state: Position) -> Position:
        return state

    def step(self, state: Position, action: Int[Array, ""], u: Noise) -> tuple[Position, Float[Array, ""], bool]:
        angles = 2 * np.pi * np.arange(self.actions) / self.actions
        moves = jnp.asarray(self.step_size * np.stack([np.cos(angles), np.sin(angles)], axis=-1), state.dtype)
        reward = (distance(state, self.goal) <= self.radius).astype(state.dtype)
        return jnp.clip(state + moves[action], -self.box, self.box), reward, False

    def outcomes(self, episode: Trajectory) -> dict[str, Float[Array, ""]]:
        """Whether an episode enters the goal region, and the distance of its last position from the goal.

        Positions are those at which decisions are made, from the start to the one before the last move.
        """
        return reach(distance(episode.obs, self.goal), episode, self.radius)


class PointNavigation(Task):
    """A point that starts at the origin; actions are velocities, clipped to +-max_speed per axis.

    As in the meta-RL literature the reward is minus the distance from the goal after the move, and the episode ends
    within `stop_within` of the goal on both axes. `radius` only defines success.
    """

    goal: Float[Array, "*n 2"]
    horizon: int = eqx.field(static=True, default=100)
    discount: float = eqx.field(static=True, default=0.99)
    max_speed: float = eqx.field(static=True, default=0.1)
    stop_within: float = eqx.field(static=True, default=0.01)
    radius: float = eqx.field(static=True, default=0.1)
    box: float = eqx.field(static=True, default=0.5)

    reset_noise = 0
    step_noise = 0
    action_size = 2

    def __check_init__(self) -> None:
        check_episode(self.horizon, self.discount)
        check_positive(max_speed=self.max_speed, radius=self.radius, box=self.box)
        check_goal(self.goal, self.box)

    def reset(self, u: Noise) -> Position:
        return jnp.zeros(2, u.dtype)

    def observe(self, state: Position) -> Position:
        return state

    def step(self, state: Position, action: Position, u: Noise) -> tuple[Position, Float[Array, ""], Bool[Array, ""]]:
        state = state + jnp.clip(action, -self.max_speed, self.max_speed)
        done = jnp.all(jnp.abs(state - jnp.asarray(self.goal, state.dtype)) < self.stop_within)
        return state, -distance(state, self.goal), done

    def outcomes(self, episode: Trajectory) -> dict[str, Float[Array, ""]]:
        """Whether an episode comes within `radius` of the goal, its final distance, and its undiscounted return."""
        score = jnp.sum(episode.reward * episode.mask)
        return {**reach(-episode.reward, episode, self.radius), "score": score}


def distance(position: Float[Array, "*m 2"], goal: Float[Array, " 2"]) -> Float[Array, "*m"]:
    """Return the Euclidean distance from the goal."""
    return jnp.sqrt(jnp.sum((position - jnp.asarray(goal, position.dtype)) ** 2, axis=-1))


def reach(far: Float[Array, " T"], episode: Trajectory, radius: float) -> dict[str, Float[Array, ""]]:
    """Return success and final distance of one episode, from its distances to the goal at every step."""
    inside = (far <= radius) & (episode.mask > 0)
    last = jnp.sum(episode.mask).astype(jnp.int32) - 1
    return {"success": jnp.any(inside).astype(far.dtype), "distance": far[last]}


def first_reach(paths: Float[np.ndarray, "m T 2"], goal: Float[np.ndarray, " 2"], radius: float) -> np.ndarray:
    """Return the step at which each recorded path first enters the goal region; its length if it never does."""
    inside = np.linalg.norm(paths - goal, axis=-1) <= radius
    return np.where(inside.any(axis=1), inside.argmax(axis=1), inside.shape[1])


def navigation(
    goals: Sequence[Point],
    held_out: Sequence[Point] = (),
    horizon: int = 20,
    discount: float = 0.9,
    radius: float = 0.2,
    step_size: float = 0.15,
    actions: int = 8,
) -> Fleet:
    """Agents in the box [-1, 1]^2 with the given goals [x, y]; reward 1 at every step within `radius` of the goal."""

    def make(goal):
        return Navigation(np.asarray(goal), horizon, discount, radius, step_size, 1.0, actions)

    return fleet([make(goal) for goal in goals], [make(goal) for goal in held_out])


def arc(
    goals: int | Sequence[float] = 6,
    held_out: int | Sequence[float] = 3,
    radius: float = 0.8,
    span: float = 0.5,
    horizon: int = 20,
    discount: float = 0.9,
) -> Fleet:
    """The paper's neural family: goals on an arc of a circle, at even angles on [-span, span] or at given ones.

    Held-out goals are evenly chosen midpoints between training goals: three out of the five midpoints of six goals are
    the first, the third and the fifth.
    """

    def evenly(n):
        return np.linspace(-span, span, n) if n > 1 else np.zeros(n)

    trained, tried = angles(goals, held_out, evenly, lambda at: (at[1:] + at[:-1]) / 2)
    return navigation(on_circle(trained, radius), on_circle(tried, radius), horizon, discount)


def circle(
    goals: int | Sequence[float] = 8,
    held_out: int | Sequence[float] = 4,
    radius: float = 0.8,
    horizon: int = 20,
    discount: float = 0.9,
) -> Fleet:
    """Goals on the whole circle: agents share little, since no direction is right for two of them."""

    def evenly(n):
        return 2 * np.pi * np.arange(n) / max(n, 1)

    trained, tried = angles(goals, held_out, evenly, lambda at: at + np.diff(at, append=at[0] + 2 * np.pi) / 2)
    return navigation(on_circle(trained, radius), on_circle(tried, radius), horizon, discount)


def point_navigation(
    agents: int = 20,
    held_out: int = 5,
    seed: int = 0,
    horizon: int = 100,
    discount: float = 0.99,
    max_speed: float = 0.1,
) -> Fleet:
    """The 2-D navigation of the meta-RL literature: goals uniform on [-0.5, 0.5]^2, actions are velocities."""
    if agents < 1 or held_out < 0:
        raise UserError(f"point-navigation needs agents >= 1 and held_out >= 0; they are {agents} and {held_out}")
    goals = np.random.default_rng(seed).uniform(-0.5, 0.5, (agents + held_out, 2))
    tasks = [PointNavigation(goal, horizon, discount, max_speed) for goal in goals]
    return fleet(tasks[:agents], tasks[agents:])


def angles(
    goals: int | Sequence[float],
    held_out: int | Sequence[float],
    evenly: Callable[[int], np.ndarray],
    midpoints: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the angles of training and held-out goals; a number stands for evenly spaced ones."""
    if isinstance(goals, int) and goals < 1:
        raise UserError(f"a fleet needs at least one goal; goals is {goals}")
    trained = evenly(goals) if isinstance(goals, int) else np.asarray(goals, dtype=float)
    if not isinstance(held_out, int):
        return trained, np.asarray(held_out, dtype=float)
    between = midpoints(np.sort(trained))
    if not 0 <= held_out <= len(between):
        raise UserError(f"held_out must be from 0 to {len(between)}, the number of midpoints; it is {held_out}")
    middle = held_out == 1
    chosen = np.linspace(0, len(between) - 1, held_out).round().astype(int) if not middle else [len(between) // 2]
    return trained, between[chosen]


def on_circle(at: np.ndarray, radius: float) -> list[Point]:
    """Return the points of a circle around the origin at the given angles."""
    return [(float(radius * np.cos(a)), float(radius * np.sin(a))) for a in at]


def check_goal(goal: Any, box: float) -> None:
    """Reject a goal outside the box; traced goals were checked before tracing."""
    if isinstance(goal, np.ndarray) and not (np.isfinite(goal).all() and (np.abs(goal) <= box).all()):
        raise UserError(f"the goal {goal.tolist()} lies outside the box [-{box:g}, {box:g}]^2")


def check_positive(**values: float) -> None:
    """Check that settings are finite and positive."""
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise UserError(f"{name} must be a finite number > 0; it is {value}")
