"""Supervised agents: each has examples of its own, in what only some classes are and what it calls them."""

from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float, Integer, Shaped

from perfedrl.envs.base import DataTask
from perfedrl.envs.fleet import Fleet, fleet
from perfedrl.errors import UserError
from perfedrl.types import Array

MOST = 100_000


class Examples(NamedTuple):
    """Inputs and their labels, along the same leading axis."""

    inputs: Float[Array, "n d"]
    labels: Shaped[Array, "n ..."]


class Classification(DataTask):
    """One agent's examples: those that it learns from, and others that it is measured on.

    It has no episodes. A policy is its classifier: an input is what it observes, a label the action that would have
    been right, and the log-probability of the action is the log-likelihood of the label.
    """

    examples: Examples
    test: Examples
    actions: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        for name, part in (("examples", self.examples), ("test", self.test)):
            if len(part.inputs) != len(part.labels) or not len(part.labels):
                raise UserError(f"{name}: there must be as many labels as inputs, and at least one of each")
            if np.min(part.labels) < 0 or np.max(part.labels) >= self.actions:
                raise UserError(f"{name}: labels must be from 0 to {self.actions - 1}, the number of classes less one")

    @property
    def observation_size(self) -> int:
        return self.examples.inputs.shape[-1]


def classification(
    agents: int = 20,
    held_out: int = 10,
    classes: int = 10,
    classes_per_agent: int = 5,
    heterogeneity: float = 1.0,
    features: int = 16,
    informative: int = 4,
    noise: float = 0.3,
    distraction: float = 1.0,
    examples: int = 100,
    test_examples: int = 200,
    seed: int = 0,
) -> Fleet:
    """Gaussian classes around prototypes that all agents share; an agent has some of the classes, under its own names.

    Prototypes are standard normal in `informative` directions that are hidden among the features by a rotation, with
    `noise` around them; in all other directions is nothing but a `distraction`. `heterogeneity` is the share of the
    labels that each agent permutes: at 0 agents agree on all names, at 1 what an example is called says nothing about
    what another agent calls it, so that one classifier for all is a guess.
    """
    check_sizes(agents, classes, classes_per_agent, features, informative, examples, test_examples)
    if held_out < 0 or seed < 0:
        raise UserError(f"classification: held_out and seed must be >= 0; they are {held_out} and {seed}")
    if not 0 <= heterogeneity <= 1 or not 0 <= noise < float("inf") or not 0 <= distraction < float("inf"):
        raise UserError("classification: heterogeneity must lie in [0, 1], noise and distraction be finite and >= 0")
    rng = np.random.default_rng(seed)
    prototypes = rng.normal(size=(classes, informative))
    rotation = np.linalg.qr(rng.normal(size=(features, features)))[0]
    world = prototypes, rotation, noise, distraction

    def agent() -> Classification:
        own = rng.choice(classes, size=classes_per_agent, replace=False)
        names = renamed(rng, classes, heterogeneity)
        learned, test = (drawn(rng, world, own, names, n) for n in (examples, test_examples))
        return Classification(learned, test, classes)

    every = [agent() for _ in range(agents + held_out)]
    return fleet(every[:agents], every[agents:])


def renamed(rng: np.random.Generator, classes: int, heterogeneity: float) -> Integer[np.ndarray, " k"]:
    """What an agent calls each class: a share of the names changed hands."""
    names, changed = np.arange(classes), rng.permutation(classes)[: round(heterogeneity * classes)]
    names[changed] = rng.permutation(changed)
    return names


def drawn(rng: np.random.Generator, world: Any, own: np.ndarray, names: np.ndarray, n: int) -> Examples:
    """Examples of an agent's own classes, all equally likely."""
    prototypes, rotation, noise, distraction = world
    kinds = rng.choice(own, size=n)
    signal = prototypes[kinds] + noise * rng.normal(size=(n, prototypes.shape[1]))
    rest = distraction * rng.normal(size=(n, len(rotation) - prototypes.shape[1]))
    inputs = np.concatenate([signal, rest], axis=1) @ rotation.T
    return Examples(inputs.astype(np.float32), names[kinds].astype(np.int32))


def check_sizes(
    agents: int, classes: int, classes_per_agent: int, features: int, informative: int, examples: int, test: int
) -> None:
    """Refuse numbers of agents, classes, features and examples that make no fleet."""
    named = {"agents": agents, "classes": classes, "features": features, "examples": examples, "test_examples": test}
    for name, count in named.items():
        least = 2 if name == "classes" else 1
        if not least <= count <= MOST:
            raise UserError(f"classification: {name} must be from {least} to {MOST}; it is {count}")
    for name, count, most in (
        ("classes_per_agent", classes_per_agent, classes),
        ("informative", informative, features),
    ):
        if not 1 <= count <= most:
            raise UserError(f"classification: {name} must be from 1 to {most}; it is {count}")
