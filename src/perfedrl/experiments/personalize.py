"""From a saved initialization to one agent's own policy: what a new agent does on the device."""

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
from perfedrl.experiments.evaluate import adaptation_step
from perfedrl.experiments.files import named_leaves, write_atomically
from perfedrl.experiments.stats import Interval, mean_interval, share_interval
from perfedrl.experiments.store import Run, load_run
from perfedrl.key_domains import PERSONALIZATION
from perfedrl.rollout import sampler
from perfedrl.simulation.evaluation import MOST_EPISODES, check_fit, episode_outcomes
from perfedrl.types import Params

EPISODES, SHOWN, MOST_STEPS = 512, 12, 100_000


@dataclass(frozen=True)
class Personalized:
    """One agent's own parameters, what they are worth to it, and what they cost.

    `before` and `after` map "return", "success" and what else the task says to means over fresh episodes with their
    95 % intervals; the rollouts are observations of some of them, both under the same random numbers. `alpha` is the
    mean where parameters have step sizes of their own.
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
        """Trajectories that the agent sampled to personalize; measuring took more, which a deployment needs not."""
        return self.trajectories * self.steps

    def save(self, path: str | Path, **about: str) -> Path:
        """Write the parameters as safetensors, with what made them as metadata."""
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
    """Turn a run's initialization into one agent's own policy by policy-gradient steps on that agent alone.

    The agent is a goal in the run's world, or one of the run's agents by number (training agents first, then those
    held out), or a task of one's own. Each of `steps` steps samples `trajectories` fresh ones; when left out, steps are
    as many as the run was trained for and share them. They are estimated as in training. `seed` picks one of the run's
    initializations, the first when left out; `draw` is any number, another one for other trajectories and episodes.
    """
    run = run if isinstance(run, Run) else load_run(run)
    check(trajectories=trajectories, steps=1 if steps is None else steps, episodes=episodes)
    if steps is None:
        steps = min(run.config.experiment.algorithm.personalization_steps, trajectories)
        trajectories //= steps
    if not whole(draw) or not 0 <= draw < 2**32:
        raise UserError(f"draw must be a whole number from 0 to 2**32 - 1; it is {draw!r}")
    seed = run.config.seeds[0] if seed is None else seed
    if seed not in run.config.seeds:
        raise UserError(f"the run has no seed {seed}; it has {', '.join(map(str, run.config.seeds))}")
    lane, policy = run.config.seeds.index(seed), run.config.experiment.policy
    step_size = adaptation_step(run, alpha, lane)
    name, chosen = choose_agent(run, goal, agent, task)
    theta = jax.tree.map(lambda x: x[lane], run.params)
    adaptation, measuring = jax.random.split(personal_key(seed, name, draw))
    adapted = _steps if isinstance(chosen, PlayedTask) else _adapted
    own = adapted(run.config.experiment.agent, chosen, theta, step_size, adaptation, trajectories, steps)
    alpha = float(np.mean(np.concatenate([np.ravel(x) for x in jax.tree.leaves(step_size)])))
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(own)):
        raise UserError(f"the agent's parameters became infinite: lower alpha, which is {alpha:g}")
    before, shown_before = measure(policy, chosen, theta, measuring, episodes)
    after, shown_after = measure(policy, chosen, own, measuring, episodes)
    run.config.experiment.fleet.close()
    own = jax.tree.map(np.asarray, own)
    measured = before, after, shown_before, shown_after
    return Personalized(name, chosen, own, *measured, trajectories, steps, alpha, seed, draw)


def personal_key(seed: int, agent: str, draw: int) -> PRNGKeyArray:
    """A key that no agent has in training or in evaluation, and no other agent here."""
    key = jax.random.fold_in(jax.random.key(seed), PERSONALIZATION)
    return jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(agent.encode())), draw)


def measure(
    policy: Any, task: Any, params: Params, key: jax.Array, episodes: int
) -> tuple[dict[str, Interval], np.ndarray]:
    """Outcomes over fresh episodes with their intervals, and the first few episodes' observations."""
    outcomes, obs = (_play if isinstance(task, PlayedTask) else _episodes)(policy, task, params, key, episodes)
    intervals = {}
    for name, values in outcomes.items():
        values = np.asarray(values, float)
        yes_or_no = name in ("success", "accuracy")
        intervals[name] = share_interval(int(values.sum()), len(values)) if yes_or_no else mean_interval(values)
    return intervals, np.asarray(obs[:SHOWN])


def choose_agent(run: Run, goal: Sequence[float] | None, agent: int | None, task: Any) -> tuple[str, Any]:
    """The agent's name and task."""
    if sum(x is not None for x in (goal, agent, task)) != 1:
        raise UserError("say which agent: a goal, an agent's number, or a task, and only one of them")
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
        raise UserError(f"a goal is two numbers, such as (0.6, 0.5); it is {goal!r}")
    if world.with_goal is None:
        raise UserError(f"the agents of {run.folder.name} have no goal that can be set; name one of them by its number")
    return "goal " + ",".join(f"{x:g}" for x in goal or ()), world.with_goal(goal)


def check(**counts: int) -> None:
    """Refuse counts that are not whole numbers from 1 to the largest that makes sense."""
    for name, count in counts.items():
        most = MOST_STEPS if name == "steps" else MOST_EPISODES
        if not whole(count) or not 1 <= count <= most:
            raise UserError(f"{name} must be from 1 to {most}; it is {count!r}")


def _steps(agent, task, theta, alpha, key, trajectories, steps):
    objective = agent(task)
    step = lambda theta, key: (adapt(objective, theta, alpha, key, trajectories), ())  # noqa: E731
    return iterate(objective, step, theta, jax.random.split(key, steps))[0]


def _play(policy, task, params, key, episodes):
    if isinstance(task, DataTask):  # all that it is tested on; there is nothing to look at
        return example_outcomes(policy, params, task.test), task.test.inputs[:0]
    batch = sampler(task, policy).sample(params, key, episodes)
    return episode_outcomes(task, batch), batch.obs


_adapted = jit(_steps, static_argnums=(5, 6))
_episodes = jit(_play, static_argnums=4)
