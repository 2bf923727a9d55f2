"""A fleet of Gymnasium environments: agents of one kind that differ in their physics, or one factory each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from perfedrl.envs.base import PlayedTask, check_episode
from perfedrl.envs.fleet import Fleet, fleet
from perfedrl.envs.gym.episodes import Act, Slots
from perfedrl.envs.gym.making import Recipe, imported
from perfedrl.envs.gym.pictures import rendered
from perfedrl.envs.gym.spaces import Spaces, sizes
from perfedrl.envs.variation import Vary, vary_agents
from perfedrl.errors import UserError
from perfedrl.types import Array, Params, Trajectory

MOST_SLOTS, MOST_AGENTS = 1024, 10_000


@dataclass(frozen=True)
class GymTask(PlayedTask):
    """One agent that lives in a Gymnasium environment, and so brings a sampler of its own."""

    name: str
    recipe: Recipe
    spaces: Spaces
    horizon: int
    discount: float
    parallel: int = 16
    processes: bool = False
    more_outcomes: Callable[[Trajectory], dict[str, Array]] | None = field(default=None, repr=False)

    @property
    def actions(self) -> int | tuple[int, ...] | None:
        return self.spaces.actions

    @property
    def action_size(self) -> int | None:
        return self.spaces.action_size

    @property
    def observation_size(self) -> int:
        return self.spaces.observation_size

    @cached_property
    def _slots(self) -> Slots:
        return Slots(self.recipe, self.name, self.parallel, self.processes)

    def sampler(self, policy: Any) -> "GymSampler":
        """What plays episodes of this agent under a policy."""
        return GymSampler(self, policy)

    def outline(self, m: int) -> Trajectory:
        """A batch of m episodes as far as shapes go."""
        mT, actions = (m, self.horizon + 1), self.spaces.actions
        if self.spaces.action_size is not None:
            action = jnp.zeros((*mT, self.spaces.action_size))
        else:
            action = jnp.zeros(mT if isinstance(actions, int) else (*mT, len(actions or ())), jnp.int32)
        return Trajectory(jnp.zeros((*mT, self.observation_size)), action, jnp.zeros(mT), jnp.ones(mT))

    def outcomes(self, episode: Trajectory) -> dict[str, Array]:
        """The sum of an episode's rewards, as Gymnasium's users know it, and what else the user asked for."""
        return {"score": jnp.sum(episode.reward), **(self.more_outcomes(episode) if self.more_outcomes else {})}

    @property
    def settings(self) -> dict[str, Any]:
        """What the environment is made with: what all agents share, and what is this agent's own."""
        return {"id": self.recipe.name, **self.recipe.options, **self.recipe.values}

    def frames(self, policy: Any, params: Params) -> list[np.ndarray]:
        """The pictures that the environment draws of one episode."""
        return rendered(self.recipe, self.name, decide(policy, params), self.horizon + 1, policy.noise)

    def close(self) -> None:
        """Close the environments, if any are open."""
        self._slots.close()


@dataclass(frozen=True)
class GymSampler:
    """Plays episodes in Python, with the decisions of all slots at once."""

    task: GymTask
    policy: Any

    traceable = False

    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Play m independent episodes; what they are depends on the parameters and the key alone."""
        return self.task._slots.play(decide(self.policy, params), self.policy.noise, key, m, self.task.horizon + 1)


def decide(policy: Any, params: Params) -> Act:
    """The decisions of all slots: in NumPy where the policy can, else as a compiled call of one shape."""
    if policy.in_numpy is not None:
        return policy.in_numpy(params)
    leaves, structure = jax.tree.flatten((policy, params))
    return partial(decisions(structure), tuple(leaves))


@lru_cache
def decisions(structure: Any) -> Callable[..., Any]:
    """Decisions as a compiled call, for a policy and parameters that were flattened before.

    A batch calls it at every step, and flattening would take longer than deciding.
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

    `vary` says which of the environment's parameters differ between agents: arguments of its constructor, or attributes
    that the constructor sets. Of a list of factories each makes one agent, the last `held_out` of them held out. An
    episode ends where the environment says so, and after `horizon` + 1 decisions. `parallel` episodes are played side
    by side, with `processes` each in a process of its own. `options` go to every constructor; `outcomes` is a function
    of an episode that says more of it than its score, {"success": ...}, say.
    """
    if not 1 <= parallel <= MOST_SLOTS:
        raise UserError(f"parallel must be from 1 to {MOST_SLOTS}; it is {parallel}")
    recipes, held_out = recipes_of(id, vary, agents, held_out, seed, options or {})
    if len(recipes) > MOST_AGENTS:
        raise UserError(f"a fleet of Gymnasium environments has at most {MOST_AGENTS} agents; this has {len(recipes)}")
    longest = recipes[0].longest
    if horizon is None and longest is None:
        raise UserError(f"say how long episodes of {recipes[0].name!r} may be: horizon, the number of decisions less 1")
    decisions_less_one = (longest or 0) - 1 if horizon is None else horizon
    check_episode(decisions_less_one, discount)
    more = imported(outcomes) if isinstance(outcomes, str) else outcomes
    if outcomes is not None and not callable(more):
        raise UserError(f"outcomes = {outcomes!r}: a function of an episode is needed, as module:function in a config")
    tasks = [
        GymTask(name_of(i, recipe), recipe, spaces, decisions_less_one, discount, parallel, processes, more)
        for i, (recipe, spaces) in enumerate(zip(recipes, looked_at(recipes), strict=True))
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
    """How each agent's environment is made, training agents first, and how many are held out."""
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


def looked_at(recipes: Sequence[Recipe]) -> list[Spaces]:
    """Every agent's spaces, from an environment that is made and closed again; they must agree."""
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
    """An agent's name in a sentence: its number, and what tells it from the others."""
    plain = lambda x: f"{x:.4g}" if isinstance(x, float | np.floating) else str(x)  # noqa: E731
    own = ", ".join(f"{key} {plain(value)}" for key, value in recipe.values.items())
    return f"agent {i} ({recipe.name}{': ' + own if own else ''})"
