"""Decisions of policies in NumPy, for batches of observations: drawn with uniforms, or the most likely actions.

All of them can be sent to another process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped
from scipy.special import ndtri

Outputs = Callable[[Shaped[np.ndarray, "n ..."]], Float[np.ndarray, "n k"]]
"""Observations -> the logits of a softmax, or the means of a Gaussian."""

EDGE = np.finfo(np.float32).eps / 2
"""Uniforms are clipped to [EDGE, 1 - EDGE] before they become normal draws."""

LARGEST = 10.0
"""Normalized observations and returns are clipped to [-LARGEST, LARGEST]."""

SHARE = 1e-6
"""Smallest variance as a share of the mean square: smaller ones are rounding errors in single precision."""

SMALLEST = 1e-8
"""Smallest variance, and smallest mean square of returns: bounds the scale of the first reward after none."""


class Decisions(ABC):
    """A policy with its parameters: `noise` is the number of uniforms that one decision takes."""

    noise: int

    @abstractmethod
    def draw(self, obs: Shaped[np.ndarray, "n ..."], u: Float[np.ndarray, "n k"]) -> Shaped[np.ndarray, "n ..."]:
        """Draw an action for each observation, as a deterministic function of the uniforms."""

    @abstractmethod
    def most_likely(self, obs: Shaped[np.ndarray, "n ..."]) -> Shaped[np.ndarray, "n ..."]:
        """Return the most likely action for each observation."""


@dataclass(frozen=True)
class Softmax(Decisions):
    """One of finitely many actions, from a softmax over the outputs."""

    logits: Outputs

    noise = 1

    def draw(self, obs: Shaped[np.ndarray, "n ..."], u: Float[np.ndarray, "n 1"]) -> Int[np.ndarray, " n"]:
        return choice(self.logits(obs), u[:, 0])

    def most_likely(self, obs: Shaped[np.ndarray, "n ..."]) -> Int[np.ndarray, " n"]:
        return np.argmax(self.logits(obs), axis=1).astype(np.int32)


@dataclass(frozen=True)
class SeveralSoftmaxes(Decisions):
    """Independent softmaxes, one for each component of an action; `actions` has their numbers of choices."""

    logits: Outputs
    actions: tuple[int, ...]

    @property
    def noise(self) -> int:  # type: ignore[override]
        return len(self.actions)

    def draw(self, obs: Shaped[np.ndarray, "n ..."], u: Float[np.ndarray, "n k"]) -> Int[np.ndarray, "n k"]:
        return np.stack([choice(part, u[:, i]) for i, part in enumerate(self._parts(obs))], axis=1)

    def most_likely(self, obs: Shaped[np.ndarray, "n ..."]) -> Int[np.ndarray, "n k"]:
        return np.stack([np.argmax(part, axis=1) for part in self._parts(obs)], axis=1).astype(np.int32)

    def _parts(self, obs: Shaped[np.ndarray, "n ..."]) -> list[np.ndarray]:
        return np.split(self.logits(obs), np.cumsum(self.actions)[:-1], axis=1)


@dataclass(frozen=True)
class Gaussian(Decisions):
    """Independent Gaussians around the outputs; without exploration, `std` None, actions are the outputs."""

    mean: Outputs
    std: Float[np.ndarray, " a"] | None

    @property
    def noise(self) -> int:  # type: ignore[override]
        return 0 if self.std is None else len(self.std)

    def draw(self, obs: Shaped[np.ndarray, "n ..."], u: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n a"]:
        if self.std is None:
            return self.most_likely(obs)
        return (self.mean(obs) + self.std * normal(u)).astype(np.float32)

    def most_likely(self, obs: Shaped[np.ndarray, "n ..."]) -> Float[np.ndarray, "n a"]:
        return self.mean(obs).astype(np.float32)


def gaussian_std(log_std: Float[np.ndarray, " a"], least_std: float) -> Float[np.ndarray, " a"]:
    """Return the standard deviations of a Gaussian policy: its variance is least_std ** 2 + exp(log_std) ** 2."""
    learned = np.exp(log_std)
    return np.sqrt(learned**2 + np.float32(least_std) ** 2) if least_std else learned


@dataclass(frozen=True)
class NormalizedInputs(Decisions):
    """Decisions that see the first components of observations in standard deviations from their mean, clipped."""

    inner: Decisions
    mean: Float[np.ndarray, " d"]
    std: Float[np.ndarray, " d"]

    @property
    def noise(self) -> int:  # type: ignore[override]
        return self.inner.noise

    def draw(self, obs: Shaped[np.ndarray, "n d"], u: Float[np.ndarray, "n k"]) -> Shaped[np.ndarray, "n ..."]:
        return self.inner.draw(clipped(obs, self.mean, self.std), u)

    def most_likely(self, obs: Shaped[np.ndarray, "n d"]) -> Shaped[np.ndarray, "n ..."]:
        return self.inner.most_likely(clipped(obs, self.mean, self.std))


@dataclass(frozen=True)
class AppendedInputs(Decisions):
    """Decisions that see some numbers after every observation, always the same ones."""

    inner: Decisions
    numbers: Float[np.ndarray, " k"]

    @property
    def noise(self) -> int:  # type: ignore[override]
        return self.inner.noise

    def draw(self, obs: Shaped[np.ndarray, "n d"], u: Float[np.ndarray, "n k"]) -> Shaped[np.ndarray, "n ..."]:
        return self.inner.draw(appended(obs, self.numbers), u)

    def most_likely(self, obs: Shaped[np.ndarray, "n d"]) -> Shaped[np.ndarray, "n ..."]:
        return self.inner.most_likely(appended(obs, self.numbers))


def network(layers: Sequence[Any]) -> Outputs:
    """Return the function of a network with tanh between its layers, each with a "weight" and a "bias"."""
    return partial(network_outputs, layers)


def network_outputs(layers: Sequence[Any], x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n k"]:
    """Return the outputs of a network for a batch of inputs."""
    for i, layer in enumerate(layers):
        x = (np.tanh(x) if i else x) @ layer["weight"] + layer["bias"]
    return x


def table(logits: Float[np.ndarray, "S A"]) -> Outputs:
    """Return the function that looks up the logits of states, which are numbers."""
    return partial(table_rows, logits)


def table_rows(logits: Float[np.ndarray, "S A"], obs: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n A"]:
    """Return the rows of a table for a batch of states."""
    return logits[obs]


def feedback(gain: Float[np.ndarray, "m n"]) -> Outputs:
    """Return the function -K x of linear state feedback."""
    return partial(feedback_outputs, gain)


def feedback_outputs(gain: Float[np.ndarray, "m n"], obs: Float[np.ndarray, "b n"]) -> Float[np.ndarray, "b m"]:
    """Return -K x for a batch of states x."""
    return -(obs @ gain.T)


def choice(logits: Float[np.ndarray, "n k"], u: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Draw from the softmax of each row by inverse transform."""
    cdf = np.cumsum(np.exp(logits - logits.max(axis=1, keepdims=True)), axis=1)
    return ((u * cdf[:, -1])[:, None] >= cdf[:, :-1]).sum(axis=1, dtype=np.int32)


def normal(u: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
    """Draw standard normal numbers by inverse transform."""
    return ndtri(np.clip(u, EDGE, 1 - EDGE))


def clipped(obs: Shaped[np.ndarray, "n e"], mean: Float[np.ndarray, " d"], std: Float[np.ndarray, " d"]) -> np.ndarray:
    """Return observations with their first components in standard deviations from their mean, clipped."""
    size = len(mean)
    seen = np.clip((obs[:, :size] - mean) / std, -LARGEST, LARGEST)
    return seen if obs.shape[1] == size else np.concatenate([seen, obs[:, size:]], axis=1)


def appended(obs: Float[np.ndarray, "*m d"], numbers: Float[np.ndarray, " k"]) -> Float[np.ndarray, "*m e"]:
    """Return observations with some numbers after each."""
    more = np.broadcast_to(np.asarray(numbers, obs.dtype), (*obs.shape[:-1], len(numbers)))
    return np.concatenate([obs, more], axis=-1)


def decide_appended(
    decide: Callable[[np.ndarray, np.ndarray], np.ndarray],
    numbers: Float[np.ndarray, " k"],
    obs: Float[np.ndarray, "n d"],
    u: Float[np.ndarray, "n uniforms"],
) -> Shaped[np.ndarray, "n ..."]:
    """Decide on observations with some numbers after each."""
    return decide(appended(obs, numbers), u)


def standard_deviation(mean: Any, square: Any, xp: Any) -> Any:
    """Return the standard deviation of observations from their mean and mean square; `xp` is NumPy or jax.numpy."""
    return xp.sqrt(xp.maximum(square - mean**2, xp.maximum(SHARE * square, SMALLEST)))


def decide_normalized(
    decide: Callable[[np.ndarray, np.ndarray], np.ndarray],
    mean: Float[np.ndarray, " d"],
    std: Float[np.ndarray, " d"],
    obs: Shaped[np.ndarray, "n e"],
    u: Float[np.ndarray, "n k"],
) -> Shaped[np.ndarray, "n ..."]:
    """Decide on observations in standard deviations from their mean, clipped."""
    return decide(clipped(obs, mean, std), u)
