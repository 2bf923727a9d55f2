"""Checks of a Gymnasium environment: play it with random actions, and say in one sentence each what is wrong.

Before training, `contract_mistake` plays a few steps of every agent's environment; `check_env` plays whole episodes and
also judges scales, lengths and repeatability.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from perfedrl.envs.gym.spaces import bounded, sizes
from perfedrl.errors import FAILURES, UserError, in_one_line
from perfedrl.gym_environment.recipe import Recipe, gymnasium
from perfedrl.gym_environment.returns import ReturnError, parse_reset, parse_reward, parse_step

FEW_STEPS = 3
"""Steps of the check before training."""

LONG = 1000
"""Decisions after which an episode that has no horizon is cut off."""

LARGE_REWARD, SMALL_REWARD, LARGE_OBSERVATION = 100.0, 1e-3, 100.0
"""Sizes from which on rewards and observations hurt a policy gradient that is not normalized."""


class Finding(NamedTuple):
    """One thing to know about an environment, in one sentence; an error must be mended before training."""

    level: Literal["error", "warning", "note"]
    text: str


@dataclass(frozen=True)
class EnvironmentCheck:
    """What `check_env` found, the worst first."""

    environment: str
    summary: str
    """The spaces, and the lengths and scores of the episodes that were played."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing must be mended; there may be warnings."""
        return all(found.level != "error" for found in self.findings)


@dataclass
class Played:
    """An episode as it was seen: every value that the environment returned, and what was wrong with it."""

    seed: int
    obs: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    over: bool = False
    mistake: str | None = None
    """A breach of Gymnasium's rules: it comes again in every episode."""
    failure: str | None = None
    """An exception, as a predicate of "the environment"."""
    not_finite: str | None = None
    outside: str | None = None
    """An observation outside of the declared bounds."""

    @property
    def where(self) -> str:
        """The place in the episode, for messages."""
        return f"(step {len(self.rewards)} of the episode with seed {self.seed})"


def check_env(
    source: str | Callable[..., Any],
    values: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    horizon: int | None = None,
    scale_actions: bool = True,
    episodes: int = 5,
) -> EnvironmentCheck:
    """Play an environment with random actions and report what is wrong with it.

    `source` is an id of Gymnasium, "module:function", or a class or function that makes the environment. `values` are
    parameters that an agent of a fleet may vary, `options` arguments of the constructor. Episodes are cut off after
    `horizon` + 1 decisions, or after 1000 where the environment has no limit of its own.
    """
    if episodes < 1 or (horizon is not None and horizon < 0):
        raise UserError(f"expected episodes >= 1 and horizon >= 0, got {episodes} and {horizon}")
    recipe = Recipe(source, values or {}, options or {})
    try:
        with recipe.opened() as env:
            spaces = sizes(env, recipe.name)
            limit = recipe.longest if horizon is None else horizon + 1
            played = play_some(env, episodes, limit or LONG)
            findings = [*judge_actions(env.action_space, scale_actions), *judge_episodes(played)]
            sound = not any(found.level == "error" for found in findings)
            if sound:
                findings += [*judge_scales(played), *judge_length(played, limit), *judge_second(recipe)]
                findings += (repeats := judge_repeat(env, played[0], "the second time"))
        if sound and not repeats:
            with recipe.opened() as new:
                findings += judge_repeat(new, played[0], "in a new environment")
    except UserError as error:
        return EnvironmentCheck(recipe.name, "", (Finding("error", str(error)),))
    order = ("error", "warning", "note")
    ranked = tuple(sorted(findings, key=lambda found: order.index(found.level)))
    return EnvironmentCheck(recipe.name, f"{spaces}; {describe(played)}", ranked)


def contract_mistake(recipe: Recipe) -> str | None:
    """Play a few steps; return the first breach of Gymnasium's rules, if there is one.

    An exception or a number that is not finite is none: it fails one episode, which is drawn again.
    """
    with recipe.opened() as env:
        return play(env, 0, FEW_STEPS).mistake


def play_some(env: Any, episodes: int, longest: int) -> list[Played]:
    """Play episodes with random actions, up to the first mistake that would come in all of them."""
    played: list[Played] = []
    for seed in range(episodes):
        played.append(play(env, seed, longest))
        if played[-1].mistake:
            break
    return played


def play(env: Any, seed: int, longest: int, actions: Sequence[Any] | None = None) -> Played:
    """Play one episode with random actions, or with given ones."""
    episode = Played(seed)
    env.action_space.seed(seed)
    try:
        see(episode, env, parse_reset(env.reset(seed=seed)))
        while not (episode.over or episode.mistake or episode.not_finite) and len(episode.rewards) < longest:
            action = env.action_space.sample() if actions is None else actions[len(episode.rewards)]
            episode.actions.append(action)
            obs, reward, terminated, truncated = parse_step(env.step(action))
            value = parse_reward(reward)
            if not np.isfinite(value):
                episode.not_finite = f"a reward is {value} {episode.where}"
            episode.rewards.append(value)
            check_flags(terminated, truncated)
            episode.over = bool(terminated or truncated)
            see(episode, env, obs)
    except FAILURES as error:
        episode.mistake = as_mistake(error)
        if episode.mistake is None:
            episode.failure = f"raised {in_one_line(error)} {episode.where}"
    return episode


def see(episode: Played, env: Any, obs: Any) -> None:
    """Keep an observation after comparing it with what is declared."""
    check_value(env.observation_space, obs, "the observation")
    flat = np.asarray(gymnasium().spaces.flatten(env.observation_space, obs), float)
    episode.obs.append(flat)
    if not np.isfinite(flat).all():
        episode.not_finite = episode.not_finite or f"an observation is not finite {episode.where}"
    elif episode.outside is None and not env.observation_space.contains(as_declared(env.observation_space, obs)):
        episode.outside = episode.where


def as_declared(space: Any, obs: Any) -> Any:
    """Convert an observation to the declared types of its boxes, so that only their bounds are judged."""
    spaces = gymnasium().spaces
    if isinstance(space, spaces.Dict):
        return {key: as_declared(part, obs[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(as_declared(part, obs[i]) for i, part in enumerate(space.spaces))
    return np.asarray(obs, space.dtype) if isinstance(space, spaces.Box) else obs


def as_mistake(error: BaseException) -> str | None:
    """Return the sentence for an exception that shows a breach of Gymnasium's rules."""
    text = str(error)
    if isinstance(error, ReturnError):
        return text
    if isinstance(error, TypeError) and "unexpected keyword argument" in text and "reset" in text:
        return f"reset must take the arguments seed and options: {text}"
    if "values to unpack (expected 5, got 4)" in text and raised_by_gymnasium(error, "step"):
        return "step must return five values, got a tuple of 4, as in old versions of Gym"
    if "values to unpack (expected 2" in text and raised_by_gymnasium(error, "reset"):
        return "reset must return (observation, info), got an observation alone, as in old versions of Gym"
    return None


def raised_by_gymnasium(error: BaseException, method: str) -> bool:
    """Whether a method of one of Gymnasium's own wrappers raised an exception, and not the environment in it."""
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    return frame.f_globals.get("__name__", "").startswith("gymnasium.") and frame.f_code.co_name == method


def check_flags(terminated: Any, truncated: Any) -> None:
    """Reject ends of episodes that are not True or False."""
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise ReturnError(f"step must return {name} as True or False, got {flag!r}")


def check_value(space: Any, value: Any, what: str) -> None:
    """Reject an observation of another structure, shape or type than its space declares."""
    spaces = gymnasium().spaces
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) or set(value) != set(space.keys()):
            got = f"the keys {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
            raise ReturnError(f"{what} must be a dict with the keys {sorted(space.keys())}, got {got}")
        for key, part in space.items():
            check_value(part, value[key], f"{what} [{key!r}]")
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            raise ReturnError(f"{what} must be a tuple of {len(space.spaces)}, got {type(value).__name__}")
        for i, part in enumerate(space.spaces):
            check_value(part, value[i], f"{what} [{i}]")
    elif isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        if not isinstance(value, np.ndarray | np.generic) or value.shape != space.shape:
            got = f"shape {value.shape}" if isinstance(value, np.ndarray) else f"a value of type {type(value).__name__}"
            raise ReturnError(f"{what} must be an array of the declared shape {space.shape}, got {got}")
        if not np.can_cast(value.dtype, space.dtype, "same_kind"):
            raise ReturnError(f"{what} must have the declared type {space.dtype}, got {value.dtype}")
    elif isinstance(space, spaces.Discrete) and not space.contains(value):
        raise ReturnError(f"{what} must be a number of {space}, got {value!r}")


def judge_actions(space: Any, scale: bool) -> list[Finding]:
    """Findings about the bounds of actions that are vectors."""
    if not isinstance(space, gymnasium().spaces.Box):
        return []
    known, low, high = bounded(space), space.low.ravel(), space.high.ravel()
    if not known.all():
        return [Finding("warning", unbounded(space))]
    if (low == high).any():
        return [Finding("error", f"a component of the action box has no width: it is always {low[low == high][0]:g}")]
    if (low == -1).all() and (high == 1).all():
        return []
    widest = int(np.argmax(high - low))
    of_box = span(low[widest], high[widest])
    if scale:
        return [Finding("note", f"actions in {of_box} are scaled: the policy acts in [-1, 1] (scale_actions = true)")]
    text = f"actions reach over {of_box}, and a policy explores by about 1 at first: leave out scale_actions = false"
    return [Finding("warning", text)]


def unbounded(space: Any) -> str:
    """The sentence about a box without bounds."""
    count = int((~bounded(space)).sum())
    return (
        f"{count} of {space.low.size} components of the action box have no bounds and are not scaled: declare bounds, "
        "so that the policy's exploration fits them"
    )


def judge_episodes(played: Sequence[Played]) -> list[Finding]:
    """Findings about broken rules, exceptions, numbers that are not finite and observations out of bounds."""
    if played[-1].mistake:
        return [Finding("error", played[-1].mistake)]
    found = [Finding("error", episode.not_finite) for episode in played if episode.not_finite][:1]
    failures = [episode.failure for episode in played if episode.failure]
    if len(failures) == len(played):
        found.append(Finding("error", f"all of {len(played)} episodes failed: the environment {failures[0]}"))
    elif failures:
        text = f"{len(failures)} of {len(played)} episodes failed: the environment {failures[0]}; training drops such"
        found.append(Finding("warning", f"{text} episodes and draws them again"))
    outside = [episode.outside for episode in played if episode.outside]
    if outside:
        found.append(Finding("warning", f"an observation lies outside of the declared bounds {outside[0]}"))
    return found


def judge_scales(played: Sequence[Played]) -> list[Finding]:
    """Findings about the sizes of rewards and observations."""
    found = []
    rewards = np.abs(np.concatenate([episode.rewards for episode in played]))
    most = float(rewards.max(initial=0.0))
    advice = 'divide them, or set rewards = "local" under [normalization]'
    if most == 0:
        text = f"all rewards of {len(played)} random episodes are 0: policy gradients learn nothing from these"
        found.append(Finding("warning", text))
    elif most > LARGE_REWARD:
        text = f"rewards reach {most:.3g}, and step sizes must be as much smaller: {advice}"
        found.append(Finding("warning", text))
    elif most < SMALL_REWARD:
        text = f"no reward is larger than {most:.2g}, and step sizes must be as much larger: multiply them"
        found.append(Finding("warning", text))
    largest = float(max(np.abs(obs).max(initial=0.0) for episode in played for obs in episode.obs))
    if largest > LARGE_OBSERVATION:
        text = f"observations reach {largest:.3g}, and networks learn best from numbers of order 1: divide them, or set"
        found.append(Finding("warning", f'{text} observations = "local" under [normalization]'))
    return found


def judge_length(played: Sequence[Played], limit: int | None) -> list[Finding]:
    """Findings about episodes that do not end."""
    if limit is not None or any(episode.over or episode.failure for episode in played):
        return []
    text = f"no episode ended within {LONG} steps, and the environment sets no limit: give the fleet a horizon"
    return [Finding("warning", text)]


def judge_second(recipe: Recipe) -> list[Finding]:
    """Findings about a second environment beside an open one."""
    try:
        with recipe.opened():
            return []
    except UserError as error:
        return [Finding("warning", f"only one can be open at a time: set parallel = 1 ({error})")]


def judge_repeat(env: Any, first: Played, how: str) -> list[Finding]:
    """Findings about an episode that differs from another one with the same seed and the same actions."""
    again = play(env, first.seed, len(first.actions), first.actions)
    pairs = zip([*first.obs, *first.rewards], [*again.obs, *again.rewards], strict=False)
    if len(again.obs) == len(first.obs) and all(np.array_equal(a, b) for a, b in pairs):
        return []
    text = f"with seed {first.seed} and the same actions an episode went otherwise {how}, so that no run can be"
    advice = "draw all randomness from self.np_random, after super().reset(seed=seed)"
    return [Finding("warning", f"{text} repeated: {advice}")]


def describe(played: Sequence[Played]) -> str:
    """Say how many episodes were played, how long they were and what they scored."""
    whole = [x for x in played if not (x.mistake or x.failure or x.not_finite)]
    if not whole:
        return "no episode could be played"
    lengths, scores = [len(x.rewards) for x in whole], [sum(x.rewards) for x in whole]
    return f"{len(whole)} random episodes of {between(lengths)} decisions, with scores of {between(scores)}"


def between(values: Sequence[float]) -> str:
    """A range as text."""
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def span(low: float | np.floating, high: float | np.floating) -> str:
    """An interval as text."""
    return f"[{low:g}, {high:g}]"
