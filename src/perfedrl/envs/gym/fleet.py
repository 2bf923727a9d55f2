"""Fleets of Gymnasium environments: one kind with different physics, or one factory per agent."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from perfedrl.contracts import delegated
from perfedrl.envs.base import PlayedTask, check_episode
from perfedrl.envs.fleet import Fleet, fleet
from perfedrl.envs.gym.episodes import Act, Slots
from perfedrl.envs.gym.recipe import Recipe, imported
from perfedrl.envs.gym.rendering import rendered
from perfedrl.envs.gym.spaces import Spaces, sizes
from perfedrl.envs.variation import Vary, vary_agents
from perfedrl.errors import UserError
from perfedrl.types import Array, Params, Trajectory

MOST_SLOTS, MOST_AGENTS = 1024, 10_000


@dataclass(frozen=True)
class GymTask(PlayedTask):
    """One agent in a Gymnasium environment."""

    name: str
    recipe: Recipe
    spaces: Spaces
    horizon: int
    discount: float
    parallel: int = 16
    processes: bool = False
    more_outcomes: Callable[[Trajectory], dict[str, Array]] | None = field(default=None, repr=False)

    actions = delegated("spaces")
    action_size = delegated("spaces")
    observation_size = delegated("spaces")

    @cached_property
    def _slots(self) -> Slots:
        return Slots(self.recipe, self.name, self.parallel, self.processes)

    def sampler(self, policy: Any) -> "GymSampler":
        """Return a sampler of this agent's episodes under a policy."""
        return GymSampler(self, policy)

    def outline(self, m: int) -> Trajectory:
        """Return m made-up episodes of the right shapes and types."""
        mT, actions = (m, self.horizon + 1), self.spaces.actions
        if self.spaces.action_size is not None:
            action = jnp.zeros((*mT, self.spaces.action_size))
        else:
            action = jnp.zeros(mT if isinstance(actions, int) else (*mT, len(actions or ())), jnp.int32)
        return Trajectory(jnp.zeros((*mT, self.observation_size)), action, jnp.zeros(mT), jnp.ones(mT))

    def outcomes(self, episode: Trajectory) -> dict[str, Array]:
        """The undiscounted return, as "score", and the outcomes of the user's function."""
        return {"score": jnp.sum(episode.reward), **(self.more_outcomes(episode) if self.more_outcomes else {})}

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the environment: those of all agents, and those of this one."""
        return {"id": self.recipe.name, **self.recipe.options, **self.recipe.values}

    def frames(self, policy: Any, params: Params) -> list[np.ndarray]:
        """Play one episode and return the rendered frames."""
        return rendered(self.recipe, self.name, decide(policy, params), self.horizon + 1, policy.noise)

    def close(self) -> None:
        """Close the open environments."""
        self._slots.close()


@dataclass(frozen=True)
class GymSampler:
    """Plays episodes in Python; the decisions of all open environments are made in one call."""

    task: GymTask
    policy: Any

    traceable = False

    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Play m independent episodes, which depend on the parameters and the key alone."""
        return self.task._slots.play(decide(self.policy, params), self.policy.noise, key, m, self.task.horizon + 1)


def decide(policy: Any, params: Params) -> Act:
    """Return the function that decides for all open environments: in NumPy where the policy can, else compiled."""
    if policy.in_numpy is not None:
        return policy.in_numpy(params)
    leaves, structure = jax.tree.flatten((policy, params))
    return partial(decisions(structure), tuple(leaves))


@lru_cache
def decisions(structure: Any) -> Callable[..., Any]:
    """Compile the decisions of a policy whose leaves, and those of its parameters, are passed flattened.

    It is called at every step of a batch, where flattening would take longer than deciding.
    """

    def act(leaves: tuple, obs: Any, u: Any) -> Any:
        policy, params = jax.tree.unflatten(structure, leaves)
        return jax.vmap(lambda obs, u: policy.sample(params, obs, u))(obs, u)

    return jax.jit(act)


def gymnasium_fleet(
    id: str | Callable[..., Any] | Sequence[Any],
    vary: Vary = (),
    agents: int | None = None,
    held_out: int = 0,
    seed: int = 0,
    horizon: int | None = None,
    discount: float = 0.99,
    parallel: int = 16,
    processes: bool = False,
    options: Mapping[str, Any] | None = None,
    outcomes: Any = None,
) -> Fleet:
    """Agents in Gymnasium environments: an id, a factory ("module:function" in a config), or a list of factories.

    `vary` names the environment's parameters that differ between agents: arguments of its constructor, or attributes
    that the constructor sets. In a list of factories each makes one agent; the last `held_out` agents do not train. An
    episode ends when the environment ends it, or after `horizon` + 1 decisions. `parallel` episodes are played side by
    side, with `processes` each in a process of its own. `options` are passed to every constructor. `outcomes` is a
    function of an episode that returns measurements beside its score, such as {"success": ...}.
    """
    if not 1 <= parallel <= MOST_SLOTS:
        raise UserError(f"parallel must be from 1 to {MOST_SLOTS}; it is {parallel}")
    recipes, held_out = recipes_of(id, vary, agents, held_out, seed, options or {})
    if len(recipes) > MOST_AGENTS:
        raise UserError(f"a fleet of Gymnasium environments has at most {MOST_AGENTS} agents; this has {len(recipes)}")
    longest = recipes[0].longest
    if horizon is None and longest is None:
        raise UserError(
            f"episodes of {recipes[0].name!r} have no registered length: give a horizon, the number of decisions less 1"
        )
    decisions_less_one = (longest or 0) - 1 if horizon is None else horizon
    check_episode(decisions_less_one, discount)
    more = imported(outcomes) if isinstance(outcomes, str) else outcomes
    if outcomes is not None and not callable(more):
        raise UserError(f"outcomes = {outcomes!r}: expected a function of an episode, as module:function in a config")
    tasks = [
        GymTask(name_of(i, recipe), recipe, spaces, decisions_less_one, discount, parallel, processes, more)
        for i, (recipe, spaces) in enumerate(zip(recipes, spaces_of(recipes), strict=True))
    ]
    return fleet(tasks[: len(tasks) - held_out], tasks[len(tasks) - held_out :])


def recipes_of(
    source: str | Callable[..., Any] | Sequence[Any],
    vary: Vary,
    agents: int | None,
    held_out: int,
    seed: int,
    options: Mapping[str, Any],
) -> tuple[list[Recipe], int]:
    """Return the recipe of each agent, training agents first, and the number of held-out agents."""
    if isinstance(source, str) or callable(source):
        split = vary_agents(vary, 8 if agents is None else agents, held_out, seed)
        return [Recipe(source, values, options) for values in (*split.train, *split.held_out)], held_out
    if not source or not all(callable(f) or isinstance(f, str) for f in source):
        raise UserError("a fleet of factories needs a list of functions that make environments, one for each agent")
    if vary:
        raise UserError("vary is for agents of one kind; factories make each agent as it is")
    if agents is not None and agents + held_out != len(source):
        raise UserError(f"there are {len(source)} factories for {agents} training agents and {held_out} held out")
    if not 0 <= held_out < len(source):
        raise UserError(f"held_out must be from 0 to {len(source) - 1}, one less than the factories; it is {held_out}")
    return [Recipe(factory, {}, options) for factory in source], held_out


def spaces_of(recipes: Sequence[Recipe]) -> list[Spaces]:
    """Return every agent's spaces, which must agree; an environment of each is made and closed for it."""
    found: list[Spaces] = []
    for i, recipe in enumerate(recipes):
        env = recipe()
        try:
            found.append(sizes(env, name_of(i, recipe)))
        finally:
            env.close()
        if found[i] != found[0]:
            raise UserError(
                f"agents of one fleet must be alike: {name_of(0, recipes[0])} has {found[0]}, "
                f"{name_of(i, recipe)} has {found[i]}"
            )
    return found


def name_of(i: int, recipe: Recipe) -> str:
    """Name an agent by its number and its own parameters, for messages."""

    def plain(x):
        return f"{x:.4g}" if isinstance(x, float | np.floating) else str(x)

    own = ", ".join(f"{key} {plain(value)}" for key, value in recipe.values.items())
    return f"agent {i} ({recipe.name}{': ' + own if own else ''})"
