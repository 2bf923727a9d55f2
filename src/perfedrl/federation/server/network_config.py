"""The config of a networked run: an experiment's config with one seed and without what only a simulator has."""

import tomllib
from typing import Any

import jax

from perfedrl.algorithms import Algorithm
from perfedrl.errors import UserError
from perfedrl.experiments.config import Config, make_config
from perfedrl.experiments.settings import validated

HELD_OUT_SETTINGS = ("few_shot", "repeats", "rollouts")
"""Settings of an evaluation that concern held-out agents, which a network does not have."""


def networked(config: Config, seed: int | None = None) -> Config:
    """Derive the config of one networked run: with the given seed, or the config's first.

    A config that is one already is returned as it is, with the experiment it has built.
    """
    if seed is not None and seed not in config.seeds:
        raise UserError(f"the config has no seed {seed}; it has {', '.join(map(str, config.seeds))}")
    if not config.experiment.algorithm.federated:
        raise UserError(f"{config.algorithm['name']} sends nothing, so its agents need no network: use perfedrl train")
    if not sends_messages(config.experiment.algorithm, config.experiment.policy):
        raise UserError(
            f"uploads of {config.algorithm['name']} differ in structure from its messages, which is not supported over "
            "a network yet: simulate it, or use fedavg-pg"
        )
    if config.attack is not None:
        raise UserError("an [attack] is for simulations; leave it out of a config for real agents")
    if config.control_variate is not None:
        raise UserError("a [control_variate] is for simulations only so far; leave it out of a config for real agents")
    table: dict[str, Any] = tomllib.loads(config.to_toml())
    table["seeds"] = [config.seeds[0] if seed is None else seed]
    table["evaluation"] = {key: value for key, value in table["evaluation"].items() if key not in HELD_OUT_SETTINGS}
    if isinstance(table["start"], str):
        table["start"] = table["seeds"][0]
    derived = validated(Config, table, "config")
    return config if derived.to_toml() == config.to_toml() else derived


def sends_messages(algorithm: Algorithm, policy: Any) -> bool:
    """Whether uploads have the structure of the message, or of a part of it."""
    if algorithm.uploads_may_be_empty:
        return False

    def message() -> Any:
        return algorithm.init(policy.init(jax.random.key(0)))[0].message

    sent, uploaded = jax.eval_shape(message), jax.eval_shape(lambda: algorithm.unchanged_upload(message()))
    return len({jax.tree.structure(sent), jax.tree.structure(uploaded)}) == 1


def config_of(text: str) -> Config:
    """Read the config in a run's specification, and build its experiment."""
    try:
        return make_config(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the plan is not valid TOML: {error}") from error
