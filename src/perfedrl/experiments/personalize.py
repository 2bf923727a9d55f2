"""Personalization: adapt the initialization of a saved run to one agent, and measure the result."""

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import PRNGKeyArray, Shaped

from perfedrl.compilation import jit
from perfedrl.envs.base import DataTask, PlayedTask, environment_part, measured_task
from perfedrl.errors import UserError
from perfedrl.estimators.meta import iterate
from perfedrl.estimators.supervised import example_outcomes
from perfedrl.experiments.agent_choice import ChosenAgent, choose_agent
from perfedrl.experiments.config import whole
from perfedrl.experiments.evaluate import adaptation_step_size
from perfedrl.experiments.files import named_leaves, write_atomically
from perfedrl.experiments.stats import SHARES, Interval, mean_interval, share_interval
from perfedrl.experiments.store import Run, load_run
from perfedrl.experiments.warm_start import WarmStart, warm_start
from perfedrl.key_domains import PERSONALIZATION
from perfedrl.policies.sighted import SightedPolicy
from perfedrl.rollout import sampler
from perfedrl.saved_policies.descriptions import Description
from perfedrl.saved_policies.file import SavedPolicy, encode
from perfedrl.simulation.evaluation import MOST_EPISODES, episode_outcomes
from perfedrl.simulation.measurements import choose_and_adapt
from perfedrl.types import Params

EPISODES, SAVED_ROLLOUTS, MOST_STEPS = 512, 12, 100_000

log = logging.getLogger("perfedrl")


@dataclass(frozen=True)
class Personalized:
    """One agent's personalized parameters, their outcomes before and after, and their cost.

    `before` and `after` map the names of outcomes ("return", and the task's own, such as "success") to means over
    fresh episodes with 95 % intervals; the rollouts are observations of some of these episodes, with the same random
    numbers before and after. `change` is the change of the return, episode by episode. `alpha` is the mean step size if
    it differs between parameters. `kept` says whether `params` are the adapted parameters, or those that the agent
    started from. `policy` acts with them.
    """

    agent: str
    task: Any = field(repr=False)
    params: Params = field(repr=False)
    before: dict[str, Interval]
    after: dict[str, Interval]
    rollouts_before: Shaped[np.ndarray, "episode T ..."] = field(repr=False)
    rollouts_after: Shaped[np.ndarray, "episode T ..."] = field(repr=False)
    trajectories: int
    steps: int
    alpha: float
    seed: int
    draw: int
    change: Interval
    kept: Literal["adapted", "start"]
    run: Run = field(repr=False)
    choice: Mapping[str, Any] = field(repr=False)
    earlier: Sequence[Mapping[str, Any]] = field(repr=False)
    """The earlier adaptations of a policy that was adapted further."""
    attempts: int = field(repr=False)
    """The number of adaptations that were tried so far, this one and those after which the start was kept included."""
    warnings: Sequence[str] = ()
    """What is unusual about the agent or its start, such as settings far from those of the training agents."""

    @property
    def cost(self) -> int:
        """The number of trajectories that the agent sampled to personalize, without those of the measurement."""
        return self.trajectories * self.steps

    @property
    def worse(self) -> bool:
        """Whether the step lowered the return, beyond the noise of the measurement."""
        return self.change.high < 0

    @property
    def policy(self) -> SavedPolicy:
        """The agent's policy, which acts without JAX; the same as `load_policy` of the file that `save` writes."""
        if self.description is None:
            kind = type(self.run.config.experiment.policy).__name__
            raise UserError(f"the policy {kind} does not describe itself; give it a `description` to act without JAX")
        return SavedPolicy(self.description, named_leaves(self.params), self.task.environment_spaces, self.about)

    @property
    def description(self) -> Description | None:
        """The policy as a plain table, with the numbers of the agent's own task where the run's agents see any."""
        policy = self.run.config.experiment.policy
        return (policy if self.task.seen is None else SightedPolicy(policy, np.asarray(self.task.seen))).description

    @property
    def about(self) -> dict[str, Any]:
        """Where the parameters came from, as it stands in the file of the policy."""
        config, last = self.run.config, {"alpha": self.alpha, "steps": self.steps, "draw": self.draw}
        adaptation = {"run": self.run.folder.name, "agent": self.agent, "trajectories_per_step": self.trajectories}
        adapted = [{**adaptation, **last}] if self.kept == "adapted" else []
        return {
            "agent": self.agent,
            "alpha": self.alpha,
            "steps": self.steps,
            "seed": self.seed,
            "trajectories_per_step": self.trajectories,
            "draw": self.draw,
            "run": self.run.folder.name,
            "digest": config.digest,
            "fleet": config.fleet,
            "algorithm": config.algorithm,
            "choice": dict(self.choice),
            "kept": self.kept,
            "adaptations": [*self.earlier, *adapted],
            "attempts": self.attempts,
            "return_before": self.before["return"].mean,
            "return_after": self.after["return"].mean,
        }

    def save(self, path: str | Path, **about: str) -> Path:
        """Write the policy as safetensors, with its description, where it came from and `about` as metadata."""
        path, spaces = Path(path), self.task.environment_spaces
        write_atomically(path, encode(self.description, named_leaves(self.params), spaces, {**self.about, **about}))
        return path


def personalize(
    run: Run | str | Path,
    *,
    goal: Sequence[float] | None = None,
    agent: int | None = None,
    task: Any = None,
    settings: Mapping[str, Any] | None = None,
    start: str | Path | SavedPolicy | None = None,
    keep: Literal["adapted", "better"] = "adapted",
    trajectories: int = 200,
    steps: int | None = None,
    alpha: float | None = None,
    seed: int | None = None,
    draw: int = 0,
    episodes: int = EPISODES,
    trust: bool = False,
) -> Personalized:
    """Adapt a run's initialization to one agent by the adaptation steps of its algorithm, on that agent alone.

    The agent is a new one of the run's family with the given `settings` (or `goal`), one of the run's agents by number
    (training agents first, then held-out ones), or your own `task`; with both, a number says from which agent settings
    that are not given are taken. Each of `steps` steps samples `trajectories` fresh trajectories; without `steps`, the
    run's number of personalization steps divides `trajectories` among them. Gradients are estimated as in training.
    Where a run has several initializations, the agent chooses one by some of the first step's trajectories.
    `seed` selects one of the run's initializations, by default the first. `draw` is any number; another number gives
    other trajectories and episodes.

    `start` is a saved policy, or its file, that is adapted further instead of the run's initialization; its agent is
    the one it was adapted to, unless another is given. `keep` says which parameters are kept: the adapted ones, or, by
    "better", those with the higher return over `episodes` episodes that the steps did not use. `trust` lets a run that
    this user did not train on this machine import the code that it names.
    """
    run = run if isinstance(run, Run) else load_run(run, trust=trust)
    trajectories, steps = checked_budget(run, trajectories, steps, draw, episodes)
    if keep not in ("adapted", "better"):
        raise UserError(f'keep must be "adapted" or "better", got {keep!r}')
    seed = run.config.seeds[0] if seed is None else seed
    if seed not in run.config.seeds:
        raise UserError(f"the run has no seed {seed}; it has {', '.join(map(str, run.config.seeds))}")
    replica = run.config.seeds.index(seed)
    step_size = adaptation_step_size(run, alpha, replica)
    begin = warm_start(run, replica, start)
    unsaid = goal is agent is task is settings is None
    chosen = choose_agent(run, **(begin.choice if unsaid and begin.choice else _choice(goal, agent, task, settings)))
    for warning in (*begin.warnings, *chosen.warnings):
        log.warning(warning)
    budget = trajectories, steps, episodes
    try:
        begin.check_spaces(chosen.task)
        return _personalized(run, chosen, begin, step_size, budget, (seed, draw), keep)
    finally:
        run.config.experiment.fleet.close()
        if isinstance(chosen.task, PlayedTask):  # a new agent's environments are not the fleet's
            chosen.task.close()


def _choice(goal: Any, agent: Any, task: Any, settings: Any) -> dict[str, Any]:
    return {"goal": goal, "agent": agent, "task": task, "settings": settings}


def _personalized(
    run: Run,
    chosen: ChosenAgent,
    begin: WarmStart,
    step_size: Any,
    budget: tuple[int, int, int],
    numbers: tuple[int, int],
    keep: str,
) -> Personalized:
    """Adapt, measure before and after on the same fresh episodes, and keep one of the two."""
    (trajectories, steps, episodes), (seed, draw) = budget, numbers
    experiment, played = run.config.experiment, isinstance(chosen.task, PlayedTask)
    adaptation, measurement = jax.random.split(personal_key(seed, chosen.name, draw))
    if begin.attempts:  # so that a further step has trajectories of its own
        adaptation = jax.random.fold_in(adaptation, begin.attempts)
    adapt_agent, play = (_adapt, _play) if played else (_adapt_compiled, _play_compiled)
    start: Any = begin.params
    if begin.message is not None:
        start = begin.message, experiment.initial_states(0)[1]
        adapt_agent = _adapt_chosen if played else _adapt_chosen_compiled
    own = adapt_agent(
        experiment.algorithm, experiment.agent, chosen.task, start, step_size, adaptation, trajectories, steps
    )
    alpha = float(np.mean(np.concatenate([np.ravel(x) for x in jax.tree.leaves(step_size)])))
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(own)):
        raise UserError(f"the agent's parameters became infinite; lower alpha, which is {alpha:g}")
    own = jax.tree.map(np.asarray, own)
    (before, shown_before), (after, shown_after) = (
        play(experiment.policy, chosen.task, params, measurement, episodes) for params in (begin.params, own)
    )
    change = mean_interval(np.asarray(after["return"], float) - np.asarray(before["return"], float))
    kept: Literal["adapted", "start"] = "start" if keep == "better" and change.mean < 0 else "adapted"
    result = Personalized(
        agent=chosen.name,
        task=chosen.task,
        params=own if kept == "adapted" else jax.tree.map(np.asarray, begin.params),
        before=intervals(before),
        after=intervals(after),
        rollouts_before=np.asarray(shown_before[:SAVED_ROLLOUTS]),
        rollouts_after=np.asarray(shown_after[:SAVED_ROLLOUTS]),
        trajectories=trajectories,
        steps=steps,
        alpha=alpha,
        seed=seed,
        draw=draw,
        change=change,
        kept=kept,
        run=run,
        choice=chosen.choice,
        earlier=begin.earlier,
        attempts=begin.attempts + 1,
        warnings=(*begin.warnings, *chosen.warnings),
    )
    if result.worse or kept == "start":
        log.warning(step_warning(result, len(before["return"])))
    return result


def step_warning(own: Personalized, episodes: int) -> str:
    """Say in numbers that a step did not help, and what is kept."""
    verb = "made the agent worse" if own.worse else "did not help"
    what = "test examples" if isinstance(own.task, DataTask) else "episodes"
    start = "the policy from the file" if own.earlier else "the shared policy"
    kept = f"{start} is kept" if own.kept == "start" else f'--keep better (keep = "better" in Python) keeps {start}'
    return (
        f"the step {verb}: return {own.before['return'].mean:.3f} -> {own.after['return'].mean:.3f}, a change of "
        f"{own.change.mean:.3g} ({own.change.low:.3g} .. {own.change.high:.3g}) over {episodes} {what} that the step "
        f"did not use; {kept}"
    )


def checked_budget(run: Run, trajectories: int, steps: int | None, draw: int, episodes: int) -> tuple[int, int]:
    """Check the counts; return the trajectories of a step and the number of steps."""
    check_counts(trajectories=trajectories, steps=1 if steps is None else steps, episodes=episodes)
    if not whole(draw) or not 0 <= draw < 2**32:
        raise UserError(f"draw must be a whole number from 0 to 2**32 - 1, got {draw!r}")
    if steps is not None:
        return trajectories, steps
    steps = min(run.config.experiment.algorithm.personalization_steps, trajectories)
    return trajectories // steps, steps


def personal_key(seed: int, agent: str, draw: int) -> PRNGKeyArray:
    """An agent's key; it differs from the keys of training and evaluation and between agents."""
    key = jax.random.fold_in(jax.random.key(seed), PERSONALIZATION)
    return jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(agent.encode())), draw)


def intervals(outcomes: Mapping[str, Any]) -> dict[str, Interval]:
    """Means of outcomes over episodes with their intervals."""
    found = {}
    for name, values in outcomes.items():
        values = np.asarray(values, float)
        share = name in SHARES
        found[name] = share_interval(int(values.sum()), len(values)) if share else mean_interval(values)
    return found


def check_counts(**counts: int) -> None:
    """Check that counts are integers from 1 to their maximum."""
    for name, count in counts.items():
        most = MOST_STEPS if name == "steps" else MOST_EPISODES
        if not whole(count) or not 1 <= count <= most:
            raise UserError(f"{name} must be from 1 to {most}, got {count!r}")


def _adapt(algorithm, agent, task, theta, alpha, key, trajectories, steps):
    """Take adaptation steps of an algorithm on a task."""
    objective = agent(task)

    def step(theta, key):
        return algorithm.adaptation_step(objective, theta, alpha, key, trajectories), ()

    return iterate(objective, step, theta, jax.random.split(key, steps))[0]


def _adapt_chosen(algorithm, agent, task, start, alpha, key, trajectories, steps):
    """As `_adapt`, from the initialization that the agent chooses by a message and its state."""
    message, state = start
    return choose_and_adapt(
        algorithm, agent(task), message, state, alpha, key, trajectories, steps, record=lambda _: ()
    )[0]


def _play(policy, task, params, key, episodes):
    """Outcomes and observations of episodes; for an agent with examples, outcomes of all test examples."""
    if isinstance(task, DataTask):
        return example_outcomes(policy, params, task.test), task.test.inputs[:0]
    batch = sampler(measured_task(task), policy).sample(params, key, episodes)
    return episode_outcomes(task, batch), environment_part(task, batch.obs)


_adapt_compiled = jit(_adapt, static_argnums=(6, 7))
_adapt_chosen_compiled = jit(_adapt_chosen, static_argnums=(6, 7))
_play_compiled = jit(_play, static_argnums=4)
