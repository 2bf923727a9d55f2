"""Fleets of Gymnasium environments: one kind with different physics, or one factory per agent."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from perfedrl.contracts import delegated
from perfedrl.envs.base import EpisodeFailures, PlayedTask, check_episode, made_up_episodes
from perfedrl.envs.fleet import Fleet, fleet
from perfedrl.envs.gym.check import contract_mistake, unbounded
from perfedrl.envs.gym.episodes import EpisodePlayer, WorkerCount, make_workers
from perfedrl.envs.gym.rendering import rendered
from perfedrl.envs.gym.space_tables import action_table, observation_table
from perfedrl.envs.gym.spaces import SpaceSizes, bounded, sizes
from perfedrl.envs.new_agents import NewAgents, Settings
from perfedrl.envs.variation import Vary, vary_agents
from perfedrl.errors import UserError, in_one_line
from perfedrl.gym_environment.episodes import Act, Convert, PlaySettings
from perfedrl.gym_environment.recipe import Recipe
from perfedrl.gym_environment.worker_pool import Workers
from perfedrl.own_modules import imported
from perfedrl.saved_policies import spaces as tables
from perfedrl.types import Array, Params, Trajectory

MOST_SLOTS, MOST_AGENTS, MOST_RETRIES = 1024, 10_000, 1000
RETRIES, TIMEOUT = 10, 60.0
DEFAULT_AGENTS = 8


@dataclass(frozen=True)
class GymTask(PlayedTask):
    """One agent in a Gymnasium environment."""

    name: str
    recipe: Recipe
    spaces: SpaceSizes
    horizon: int
    discount: float
    parallel: int = 16
    timeout: float | None = None
    """The seconds that a step may take where every environment has a process of its own; None in this process."""
    retries: int = RETRIES
    scale_actions: bool = True
    more_outcomes: Callable[[Trajectory], dict[str, Array]] | None = field(default=None, repr=False)
    workers: Workers | None = field(default=None, compare=False, repr=False)
    """The processes that play the episodes of all agents of the fleet; None in this process."""

    actions = delegated("spaces")
    action_size = delegated("spaces")
    observation_size = delegated("spaces")

    @cached_property
    def _player(self) -> EpisodePlayer:
        size = self.spaces.observation_size
        settings = PlaySettings(
            self.recipe, self.name, self.parallel, size, self.to_actions, self.retries, self.timeout
        )
        return EpisodePlayer(settings, self.workers)

    @cached_property
    def to_actions(self) -> Convert:
        """The map from a batch of a policy's actions to actions of the environment."""
        return action_table(self.spaces.action_space, self.scale_actions).to_environment()

    @property
    def failures(self) -> EpisodeFailures:
        """The failed episodes and restarted processes so far."""
        return self._player.failures

    def sampler(self, policy: Any) -> "GymSampler":
        """Return a sampler of this agent's episodes under a policy."""
        return GymSampler(self, policy)

    def outline(self, m: int) -> Trajectory:
        """Return m made-up episodes of the right shapes and types."""
        return made_up_episodes(m, self.horizon, self.observation_size, self.actions, self.action_size)

    @property
    def environment_spaces(self) -> tables.Spaces:
        """The environment's own spaces; an environment is made and closed to look at them."""
        with self.recipe.opened() as env:
            actions = action_table(env.action_space, self.scale_actions)
            return tables.Spaces(observations=observation_table(env.observation_space), actions=actions)

    def outcomes(self, episode: Trajectory) -> dict[str, Array]:
        """The undiscounted return, as "score", and the outcomes of the user's function."""
        return {"score": jnp.sum(episode.reward), **(self.more_outcomes(episode) if self.more_outcomes else {})}

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the environment: those of all agents, and those of this one."""
        return {"id": self.recipe.name, **self.recipe.options, **self.recipe.values}

    def frames(self, policy: Any, params: Params) -> list[np.ndarray]:
        """Play one episode and return the rendered frames."""
        return rendered(self.recipe, self.name, decide(policy, params), self.to_actions, self.horizon + 1, policy.noise)

    def check(self) -> list[str]:
        """Play a few steps and reject an environment that breaks Gymnasium's rules; warn of actions without bounds.

        An environment that has a process of its own may crash, and is not played here: its first episodes are checked.
        """
        mistake = contract_mistake(self.recipe) if self.timeout is None else None
        if mistake is not None:
            raise UserError(f"{self.name}: {mistake}; `perfedrl check` says more of an environment")
        return [f"{self.recipe.name}: {unbounded(self.spaces.action_space)}"] if self._unbounded else []

    @property
    def _unbounded(self) -> bool:
        return self.spaces.action_size is not None and not bounded(self.spaces.action_space).all()

    def close(self) -> None:
        """Close the open environments."""
        self._player.close()


@dataclass(frozen=True)
class GymSampler:
    """Plays episodes in Python; the decisions of all open environments are made in one call."""

    task: GymTask
    policy: Any

    traceable = False

    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Play m independent episodes, which depend on the parameters and the key alone."""
        act, in_numpy = decide(self.policy, params), self.policy.in_numpy is not None
        return self.task._player.play(act, self.policy.noise, key, m, self.task.horizon + 1, sendable=in_numpy)


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
    scale_actions: bool = True,
    retries: int = RETRIES,
    timeout: float | None = None,
    workers: WorkerCount = 1,
) -> Fleet:
    """Agents in Gymnasium environments: an id, a factory ("module:function" in a config), or a list of factories.

    `vary` names the environment's parameters that differ between agents: arguments of its constructor, or attributes
    that the constructor sets. In a list of factories each makes one agent; the last `held_out` agents do not train. An
    episode ends when the environment ends it, or after `horizon` + 1 decisions. `parallel` episodes are played side by
    side, with `processes` each in a process of its own. `options` are passed to every constructor. `outcomes` is a
    function of an episode that returns measurements beside its score, such as {"success": ...}.

    With `workers` > 1 so many processes share the episodes of every batch; "auto" is one for each core. They pay where
    a step takes some ten microseconds or more.

    With `scale_actions` a policy acts in [-1, 1], which is mapped to every bounded component of the environment's box.
    An episode that fails is dropped and drawn again, at most `retries` times. With `processes` a step that takes longer
    than `timeout` seconds, 60 by default, fails its episode.
    """
    check_limits(parallel, processes, retries, timeout)
    shared = make_workers(workers, processes, parallel)
    check_count((agents or 0) + held_out)
    recipes, held_out = recipes_of(id, vary, agents, held_out, seed, options or {})
    check_count(len(recipes))
    decisions_less_one = horizon_of(recipes[0]) if horizon is None else horizon
    check_episode(decisions_less_one, discount)
    limit = (TIMEOUT if timeout is None else timeout) if processes else None
    tasks = [
        GymTask(
            name_of(i, recipe),
            recipe,
            spaces,
            decisions_less_one,
            discount,
            parallel=parallel,
            timeout=limit,
            retries=retries,
            scale_actions=scale_actions,
            more_outcomes=outcomes_of(outcomes),
            workers=shared,
        )
        for i, (recipe, spaces) in enumerate(zip(recipes, spaces_of(recipes), strict=True))
    ]
    check_outcomes(tasks[0], outcomes)
    settings, kinds = [{**x.recipe.options, **x.recipe.values} for x in tasks], {x.recipe.name for x in tasks}
    family = NewAgents(with_settings, settings, open=True, several_kinds=len(kinds) > 1)
    return fleet(tasks[: len(tasks) - held_out], tasks[len(tasks) - held_out :], family)


def horizon_of(recipe: Recipe) -> int:
    """Return the registered number of decisions of an environment, less 1."""
    if recipe.longest is None:
        raise UserError(
            f"episodes of {recipe.name!r} have no registered length: give a horizon, the number of decisions less 1"
        )
    return recipe.longest - 1


def outcomes_of(given: Any) -> Callable[[Trajectory], Any] | None:
    """Return the function of an episode that a user gives, or names by `module:function`."""
    function = imported(given, "function for outcomes") if isinstance(given, str) else given
    if given is not None and not callable(function):
        raise UserError(f"outcomes = {given!r}: expected a function of an episode, as module:function in a config")
    return function


def check_outcomes(task: GymTask, name: Any) -> None:
    """Reject a function of an episode that does not compute numbers with names, as JAX traces it."""
    if task.more_outcomes is None:
        return
    episode = jax.tree.map(lambda x: x[0], task.outline(1))
    try:
        found = jax.eval_shape(task.more_outcomes, episode)
    except Exception as error:
        raise UserError(
            f"outcomes = {name!r} fails: {in_one_line(error)}; it gets an episode with the arrays obs, action, reward "
            "and mask, which JAX traces: compute with jax.numpy, and choose with jax.numpy.where instead of if"
        ) from error
    numbers = isinstance(found, dict) and all(isinstance(key, str) and x.shape == () for key, x in found.items())
    if not numbers:
        raise UserError(f"outcomes = {name!r} must return a dict of names and numbers, one number for each name")


def with_settings(task: GymTask, settings: Settings) -> GymTask:
    """Return an agent like another, with other options and values of its environment."""
    options = {name: settings[name] for name in task.recipe.options}
    values = {name: value for name, value in settings.items() if name not in options}
    recipe = replace(task.recipe, options=options, values=values)
    (spaces,) = spaces_of([recipe])
    if spaces != task.spaces:
        raise UserError(f"the new agent must be like the fleet's: these have {task.spaces}, it has {spaces}")
    return replace(task, name=f"the new agent {recipe.described}", recipe=recipe, spaces=spaces)


def check_limits(parallel: int, processes: bool, retries: int, timeout: float | None) -> None:
    """Check the settings that say how episodes are played."""
    if not 1 <= parallel <= MOST_SLOTS:
        raise UserError(f"parallel must be from 1 to {MOST_SLOTS}; it is {parallel}")
    if not 0 <= retries <= MOST_RETRIES:
        raise UserError(f"retries must be from 0 to {MOST_RETRIES}; it is {retries}")
    if timeout is not None and not timeout > 0:
        raise UserError(f"timeout must be a number of seconds > 0; it is {timeout}")
    if timeout is not None and not processes:
        raise UserError("timeout needs processes = true: a step in perfedrl's own process cannot be stopped")


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
        split = vary_agents(vary, DEFAULT_AGENTS if agents is None else agents, held_out, seed)
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


def training_agents(table: Mapping[str, Any]) -> int:
    """The number of training agents that a config's fleet asks for; no environment is made."""
    listed, agents = table.get("id"), table.get("agents")
    if agents is None:
        agents = DEFAULT_AGENTS if listed is None or isinstance(listed, str) else len(listed) - table["held_out"]
    check_count(agents)
    return agents


def check_count(agents: int) -> None:
    """Reject fleets of too many agents."""
    if agents > MOST_AGENTS:
        raise UserError(f"a fleet of Gymnasium environments has at most {MOST_AGENTS} agents; this has {agents}")


def spaces_of(recipes: Sequence[Recipe]) -> list[SpaceSizes]:
    """Return every agent's spaces, which must agree; an environment of each is made and closed for it."""
    found: list[SpaceSizes] = []
    for i, recipe in enumerate(recipes):
        with recipe.opened() as env:
            found.append(sizes(env, name_of(i, recipe)))
        if found[i] != found[0]:
            raise UserError(
                f"agents of one fleet must be alike: {name_of(0, recipes[0])} has {found[0]}, "
                f"{name_of(i, recipe)} has {found[i]}"
            )
    return found


def name_of(i: int, recipe: Recipe) -> str:
    """Name an agent by its number and its own parameters, for messages."""
    return f"agent {i} {recipe.described}"
