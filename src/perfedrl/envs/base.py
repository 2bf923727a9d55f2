"""The contract of a task: everything that the library asks of an agent's environment.

A task is one agent's problem. It subclasses one of three classes:

- `Task`: an environment written in JAX, which is compiled together with the algorithm;
- `PlayedTask`: an environment that is stepped in Python (Gymnasium, a robot) and brings its own sampler;
- `DataTask`: labelled examples instead of episodes.

`BaseTask` documents what they have in common. Members that a task need not have default to None, and so callers test
`task.sketch is None`. A subclass overrides a member with a dataclass field, a class attribute, a property or a method,
whichever is shortest. Nothing else is looked up on a task.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, PyTree

from perfedrl.contracts import default_property, undefined
from perfedrl.errors import UserError
from perfedrl.saved_policies.spaces import Spaces
from perfedrl.types import Array, Noise, Params, Sampler, Trajectory

State = PyTree[Any]

Polyline = Float[np.ndarray, "_ 2"]
"""A line of a drawing in the plane, in metres."""

LONGEST_HORIZON = 1_000_000

SUBCLASS = "perfedrl.envs.Task (in JAX), PlayedTask (in Python) or DataTask (labelled examples)"


class BaseTask:
    """The members of all tasks. Subclass `Task`, `PlayedTask` or `DataTask` instead."""

    @default_property
    def horizon(self) -> int:
        """H: an episode has H + 1 decisions. Required."""
        raise undefined(self, "horizon", "perfedrl.envs.Task")

    @default_property
    def discount(self) -> float:
        """The discount factor gamma. Required."""
        raise undefined(self, "discount", "perfedrl.envs.Task")

    # What policies must know of the spaces.

    @default_property
    def actions(self) -> int | tuple[int, ...] | None:
        """Number of discrete actions, or of choices of each component of an action; None for other actions."""

    @default_property
    def action_size(self) -> int | None:
        """Length of an action that is a vector; None for other actions."""

    @default_property
    def observation_size(self) -> int | None:
        """Length of an observation, which is a vector; where None, a `Task` is traced to find it out."""

    @default_property
    def environment_spaces(self) -> Spaces | None:
        """The environment's own spaces, where its observations and actions are not those of the policy."""

    @default_property
    def seen(self) -> Float[Array, "*n k"] | tuple[float, ...] | None:
        """Numbers of the agent's own task that end every observation (`policies/sighted.py`); None where none do."""

    # What is measured and shown.

    @default_property
    def measured_on(self) -> Any:
        """The task on which the agent is measured, where that is another one (other days of its data); None elsewhere.

        It has the same spaces, horizon and outcomes. Adaptation and training never see it.
        """

    def outcomes(self, episode: Trajectory) -> dict[str, Any]:
        """Measurements of one episode beside its return, such as {"success": ..., "distance": ...}."""
        return {}

    @property
    def settings(self) -> dict[str, Any]:
        """The values that describe this task in the table of `perfedrl inspect`, by name."""
        return {}

    @default_property
    def sketch(self) -> Callable[[Any], list[Polyline]] | None:
        """Drawing of one observation: `sketch(obs)` returns lines in the plane, the ground first."""

    @default_property
    def frames(self) -> Callable[[Any, Params], list[np.ndarray]] | None:
        """Pictures of one episode: `frames(policy, params)` plays and renders it."""

    # Navigation in the plane; observations are positions where these are given.

    @default_property
    def goal(self) -> Float[Array, "*n 2"] | None:
        """The agent's goal."""

    @default_property
    def radius(self) -> float | None:
        """Distance from the goal that counts as success."""

    @default_property
    def box(self) -> float | None:
        """Half the width of the square around the origin that pictures show."""

    # Constants of the theory.

    @default_property
    def reward_bound(self) -> float | None:
        """R_max of Assumption 1, over all agents of a stack; None where rewards are unbounded."""

    @default_property
    def observation_bound(self) -> float | None:
        """The largest norm of an observation; None where observations are unbounded."""


class Task(BaseTask, eqx.Module):
    """One agent's MDP in JAX: required are `horizon`, `discount`, `reset_noise`, `step_noise` and the three methods.

    A task is a pytree. Array fields may differ between the agents of a fleet, static fields are shared; tasks stacked
    along a leading axis are a task of the same class. Methods are written for one episode of one agent; callers `vmap`.

    All randomness comes in as uniforms on [0, 1), as many as the task declares, so an episode is a deterministic
    function of (parameters, task, uniforms): one call draws the uniforms of a whole batch, and two policies can be
    compared under common random numbers.
    """

    @default_property
    def reset_noise(self) -> int:
        """Number of uniforms that `reset` takes. Required."""
        raise undefined(self, "reset_noise", "perfedrl.envs.Task")

    @default_property
    def step_noise(self) -> int:
        """Number of uniforms that each `step` takes. Required."""
        raise undefined(self, "step_noise", "perfedrl.envs.Task")

    @abstractmethod
    def reset(self, u: Noise) -> State:
        """Return the state in which an episode starts."""

    @abstractmethod
    def observe(self, state: State) -> PyTree[Array]:
        """Return the observation of a state."""

    @abstractmethod
    def step(
        self, state: State, action: PyTree[Array], u: Noise
    ) -> tuple[State, Float[Array, ""], Bool[Array, ""] | bool]:
        """Return the next state, the reward of this step, and whether the episode is over."""

    @property
    def settings(self) -> dict[str, Any]:
        """The task's leaves by path."""
        return leaves_by_path(self)

    def __check_init__(self) -> None:
        _ = self.horizon, self.discount, self.reset_noise, self.step_noise


class EpisodeFailures(NamedTuple):
    """How often the environment of a played task failed so far."""

    episodes: int = 0
    """Episodes that failed; they were dropped, and all but the last in a row were drawn again."""
    restarts: int = 0
    """Processes of environments that ended or did not answer; they were started again."""


class PlayedTask(BaseTask, ABC):
    """One agent whose environment JAX cannot trace: required are `horizon`, `discount`, `sampler` and `outline`.

    Policies need `observation_size` and `actions` or `action_size`, since nothing can be traced to find them out.
    Instances are hashable (a frozen dataclass, say) and opaque to JAX.
    """

    @abstractmethod
    def sampler(self, policy: Any) -> Sampler:
        """Return the sampler that plays episodes under a policy; its `traceable` is False."""

    @abstractmethod
    def outline(self, m: int) -> Trajectory:
        """Return m made-up episodes of the right shapes and types."""

    @property
    def failures(self) -> EpisodeFailures:
        """The failures of the environment so far, where they are counted."""
        return EpisodeFailures()

    def check(self) -> list[str]:
        """Raise a `UserError` if the environment breaks its contract; return warnings. Called before training."""
        return []

    def close(self) -> None:
        """Close open environments. Called when work ends, also by an error; they may be opened again later."""


class DataTask(BaseTask, eqx.Module):
    """One agent that has labelled examples instead of episodes: required are `examples` and `test`.

    `actions` is the number of classes. The objective is the log-likelihood of the labels.
    """

    horizon = 0
    """An example is a single decision."""
    discount = 0.0

    @default_property
    def examples(self) -> Any:
        """The `Examples` (inputs and labels) that the agent learns from. Required."""
        raise undefined(self, "examples", "perfedrl.envs.DataTask")

    @default_property
    def test(self) -> Any:
        """The `Examples` that the agent is measured on and never learns from. Required."""
        raise undefined(self, "test", "perfedrl.envs.DataTask")

    @property
    def settings(self) -> dict[str, Any]:
        """The task's leaves by path."""
        return leaves_by_path(self)

    def __check_init__(self) -> None:
        _ = self.examples, self.test


def made_up_episodes(
    m: int, horizon: int, observation_size: int, actions: int | tuple[int, ...] | None, action_size: int | None
) -> Trajectory:
    """Return m episodes of zeros for spaces of these sizes, with the shapes and types of played ones."""
    mT = m, horizon + 1
    if action_size is not None:
        action = jnp.zeros((*mT, action_size))
    else:
        action = jnp.zeros(mT if isinstance(actions, int) else (*mT, len(actions or ())), jnp.int32)
    return Trajectory(jnp.zeros((*mT, observation_size)), action, jnp.zeros(mT), jnp.ones(mT))


def leaves_by_path(task: Any) -> dict[str, np.ndarray]:
    """The array leaves of a pytree, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(task)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def environment_part(task: BaseTask, obs: Any) -> Any:
    """Return the part of observations that comes from the environment, without the numbers of the agent's own task."""
    return obs if task.seen is None else obs[..., : obs.shape[-1] - np.shape(task.seen)[-1]]


def measured_task(task: BaseTask) -> Any:
    """Return the task on which an agent is measured."""
    other = task.measured_on
    return task if other is None else other


def check_task(task: Any, who: str) -> None:
    """Reject an object that does not subclass one of the three kinds of tasks."""
    if not isinstance(task, Task | PlayedTask | DataTask):
        raise UserError(f"{who} is a {type(task).__name__}, which is not a task: subclass {SUBCLASS}")


def check_episode(horizon: int, discount: float, who: str = "") -> None:
    """Reject an invalid horizon or discount."""
    if not 0 <= horizon <= LONGEST_HORIZON or horizon != int(horizon):
        raise UserError(f"{who}horizon must be a whole number >= 0 and <= {LONGEST_HORIZON}; it is {horizon}")
    if not 0 <= discount < 1:
        raise UserError(f"{who}discount must lie in [0, 1); it is {discount}")
