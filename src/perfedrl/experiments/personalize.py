"""Personalization: adapt the initialization of a saved run to one agent, and measure the result."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray, Shaped
from safetensors.numpy import save

from perfedrl.compilation import jit
from perfedrl.envs.base import DataTask, PlayedTask, check_task
from perfedrl.errors import UserError
from perfedrl.estimators import adapt
from perfedrl.estimators.meta import iterate
from perfedrl.estimators.supervised import example_outcomes
from perfedrl.experiments.config import whole
from perfedrl.experiments.evaluate import adaptation_step_size
from perfedrl.experiments.files import named_leaves, write_atomically
from perfedrl.experiments.stats import Interval, mean_interval, share_interval
from perfedrl.experiments.store import Run, load_run
from perfedrl.key_domains import PERSONALIZATION
from perfedrl.rollout import sampler
from perfedrl.simulation.evaluation import MOST_EPISODES, check_fit, episode_outcomes
from perfedrl.types import Params

EPISODES, SAVED_ROLLOUTS, MOST_STEPS = 512, 12, 100_000


@dataclass(frozen=True)
class Personalized:
    """One agent's personalized parameters, their outcomes before and after, and their cost.

    `before` and `after` map the names of outcomes ("return", and the task's own, such as "success") to means over
    fresh episodes with 95 % intervals; the rollouts are observations of some of these episodes, with the same random
    numbers before and after. `alpha` is the mean step size if it differs between parameters.
    """

    agent: str
    task: Any
    params: Params
    before: dict[str, Interval]
    after: dict[str, Interval]
    rollouts_before: Shaped[np.ndarray, "episode T ..."]
    rollouts_after: Shaped[np.ndarray, "episode T ..."]
    trajectories: int
    steps: int
    alpha: float
    seed: int
    draw: int

    @property
    def cost(self) -> int:
        """The number of trajectories that the agent sampled to personalize, without those of the measurement."""
        return self.trajectories * self.steps

    def save(self, path: str | Path, **about: str) -> Path:
        """Write the parameters as safetensors, with the settings and `about` as metadata."""
        facts = {"agent": self.agent, "alpha": f"{self.alpha:g}", "steps": str(self.steps), "seed": str(self.seed)}
        facts |= {"trajectories_per_step": str(self.trajectories), "draw": str(self.draw), **about}
        path = Path(path)
        write_atomically(path, save(named_leaves(self.params), metadata=facts))
        return path


def personalize(
    run: Run | str | Path,
    *,
    goal: Sequence[float] | None = None,
    agent: int | None = None,
    task: Any = None,
    trajectories: int = 200,
    steps: int | None = None,
    alpha: float | None = None,
    seed: int | None = None,
    draw: int = 0,
    episodes: int = EPISODES,
) -> Personalized:
    """Adapt a run's initialization to one agent by policy-gradient steps on that agent alone.

    The agent is a `goal` in the run's world, one of the run's agents by number (training agents first, then held-out
    ones), or your own `task`. Each of `steps` steps samples `trajectories` fresh trajectories; without `steps`, the
    run's number of personalization steps divides `trajectories` among them. Gradients are estimated as in training.
    `seed` selects one of the run's initializations, by default the first. `draw` is any number; another number gives
    other trajectories and episodes.
    """
    run = run if isinstance(run, Run) else load_run(run)
    check_counts(trajectories=trajectories, steps=1 if steps is None else steps, episodes=episodes)
    if steps is None:
        steps = min(run.config.experiment.algorithm.personalization_steps, trajectories)
        trajectories //= steps
    if not whole(draw) or not 0 <= draw < 2**32:
        raise UserError(f"draw must be a whole number from 0 to 2**32 - 1, got {draw!r}")
    seed = run.config.seeds[0] if seed is None else seed
    if seed not in run.config.seeds:
        raise UserError(f"the run has no seed {seed}; it has {', '.join(map(str, run.config.seeds))}")
    replica, policy = run.config.seeds.index(seed), run.config.experiment.policy
    step_size = adaptation_step_size(run, alpha, replica)
    name, chosen = choose_agent(run, goal, agent, task)
    theta = jax.tree.map(lambda x: x[replica], run.params)
    adaptation, measurement = jax.random.split(personal_key(seed, name, draw))
    adapt_agent = _adapt if isinstance(chosen, PlayedTask) else _adapt_compiled
    own = adapt_agent(run.config.experiment.agent, chosen, theta, step_size, adaptation, trajectories, steps)
    alpha = float(np.mean(np.concatenate([np.ravel(x) for x in jax.tree.leaves(step_size)])))
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(own)):
        raise UserError(f"the agent's parameters became infinite; lower alpha, which is {alpha:g}")
    before, shown_before = measure(policy, chosen, theta, measurement, episodes)
    after, shown_after = measure(policy, chosen, own, measurement, episodes)
    run.config.experiment.fleet.close()
    own = jax.tree.map(np.asarray, own)
    measured = before, after, shown_before, shown_after
    return Personalized(name, chosen, own, *measured, trajectories, steps, alpha, seed, draw)


def personal_key(seed: int, agent: str, draw: int) -> PRNGKeyArray:
    """An agent's key; it differs from the keys of training and evaluation and between agents."""
    key = jax.random.fold_in(jax.random.key(seed), PERSONALIZATION)
    return jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(agent.encode())), draw)


def measure(
    policy: Any, task: Any, params: Params, key: jax.Array, episodes: int
) -> tuple[dict[str, Interval], np.ndarray]:
    """Means of outcomes over fresh episodes with their intervals, and the observations of some episodes."""
    outcomes, obs = (_play if isinstance(task, PlayedTask) else _play_compiled)(policy, task, params, key, episodes)
    intervals = {}
    for name, values in outcomes.items():
        values = np.asarray(values, float)
        binary = name in ("success", "accuracy")
        intervals[name] = share_interval(int(values.sum()), len(values)) if binary else mean_interval(values)
    return intervals, np.asarray(obs[:SAVED_ROLLOUTS])


def choose_agent(run: Run, goal: Sequence[float] | None, agent: int | None, task: Any) -> tuple[str, Any]:
    """The name and the task of the agent that the caller selected."""
    if sum(x is not None for x in (goal, agent, task)) != 1:
        raise UserError("say which agent: expected a goal, an agent's number, or a task, and only one of them")
    fleet = run.config.experiment.fleet
    if agent is not None:
        if not 0 <= agent < fleet.agents + fleet.held_out_agents:
            raise UserError(
                f"there is no agent {agent}: training agents are 0 to {fleet.agents - 1}"
                + (f", held-out ones go on to {fleet.agents + fleet.held_out_agents - 1}" if fleet.held_out else "")
            )
        if agent < fleet.agents:
            return f"agent {agent} (training)", fleet.task(agent)
        return f"agent {agent} (held out)", fleet.task(agent - fleet.agents, held_out=True)
    if task is not None:
        check_task(task, "the task")
        check_fit(task, run.config.experiment.policy)
        return "own task", task
    world = fleet.task(0)
    if isinstance(goal, str):
        raise UserError(f"a goal must be two numbers, such as (0.6, 0.5), got {goal!r}")
    if world.with_goal is None:
        raise UserError(f"the agents of {run.folder.name} have no goal that can be set; name one of them by its number")
    return "goal " + ",".join(f"{x:g}" for x in goal or ()), world.with_goal(goal)


def check_counts(**counts: int) -> None:
    """Check that counts are integers from 1 to their maximum."""
    for name, count in counts.items():
        most = MOST_STEPS if name == "steps" else MOST_EPISODES
        if not whole(count) or not 1 <= count <= most:
            raise UserError(f"{name} must be from 1 to {most}, got {count!r}")


def _adapt(agent, task, theta, alpha, key, trajectories, steps):
    """Take policy-gradient steps on a task."""
    objective = agent(task)

    def step(theta, key):
        return adapt(objective, theta, alpha, key, trajectories), ()

    return iterate(objective, step, theta, jax.random.split(key, steps))[0]


def _play(policy, task, params, key, episodes):
    """Outcomes and observations of episodes; for an agent with examples, outcomes of all test examples."""
    if isinstance(task, DataTask):
        return example_outcomes(policy, params, task.test), task.test.inputs[:0]
    batch = sampler(task, policy).sample(params, key, episodes)
    return episode_outcomes(task, batch), batch.obs


_adapt_compiled = jit(_adapt, static_argnums=(5, 6))
_play_compiled = jit(_play, static_argnums=4)
