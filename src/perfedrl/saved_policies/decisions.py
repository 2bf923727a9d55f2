"""Decisions of policies in NumPy, for batches of observations: drawn with uniforms, or the most likely actions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """Decisions that see observations in standard deviations from their mean, clipped."""

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
class ContextInputs(Decisions):
    """Decisions that see a context after each observation."""

    inner: Decisions
    context: Float[np.ndarray, " k"]

    @property
    def noise(self) -> int:  # type: ignore[override]
        return self.inner.noise

    def draw(self, obs: Shaped[np.ndarray, "n d"], u: Float[np.ndarray, "n k"]) -> Shaped[np.ndarray, "n ..."]:
        return self.inner.draw(with_context(obs, self.context), u)

    def most_likely(self, obs: Shaped[np.ndarray, "n d"]) -> Shaped[np.ndarray, "n ..."]:
        return self.inner.most_likely(with_context(obs, self.context))


def with_context(obs: Shaped[np.ndarray, "n d"], context: Float[np.ndarray, " k"]) -> Shaped[np.ndarray, "n e"]:
    """Append a context to each observation."""
    return np.concatenate([obs, np.broadcast_to(context.astype(obs.dtype), (len(obs), len(context)))], axis=1)


def network(layers: Sequence[Any]) -> Outputs:
    """Return the function of a network with tanh between its layers, each with a "weight" and a "bias"."""

    def outputs(x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n k"]:
        for i, layer in enumerate(layers):
            x = (np.tanh(x) if i else x) @ layer["weight"] + layer["bias"]
        return x

    return outputs


def table(logits: Float[np.ndarray, "S A"]) -> Outputs:
    """Return the function that looks up the logits of states, which are numbers."""
    return lambda obs: logits[obs]


def feedback(gain: Float[np.ndarray, "m n"]) -> Outputs:
    """Return the function -K x of linear state feedback."""
    return lambda obs: -(obs @ gain.T)


def choice(logits: Float[np.ndarray, "n k"], u: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Draw from the softmax of each row by inverse transform."""
    cdf = np.cumsum(np.exp(logits - logits.max(axis=1, keepdims=True)), axis=1)
    return ((u * cdf[:, -1])[:, None] >= cdf[:, :-1]).sum(axis=1, dtype=np.int32)


def normal(u: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
    """Draw standard normal numbers by inverse transform."""
    return ndtri(np.clip(u, EDGE, 1 - EDGE))


def clipped(obs: Shaped[np.ndarray, "n d"], mean: Float[np.ndarray, " d"], std: Float[np.ndarray, " d"]) -> np.ndarray:
    """Return observations in standard deviations from their mean, clipped."""
    return np.clip((obs - mean) / std, -LARGEST, LARGEST)


def standard_deviation(mean: Any, square: Any, xp: Any) -> Any:
    """Return the standard deviation of observations from their mean and mean square; `xp` is NumPy or jax.numpy."""
    return xp.sqrt(xp.maximum(square - mean**2, xp.maximum(SHARE * square, SMALLEST)))
