"""From an experiment's config to what is trained over a network: one seed, and nothing that only a simulator has."""

import tomllib
from typing import Any

import jax

from perfedrl.algorithms import Algorithm
from perfedrl.errors import UserError
from perfedrl.experiments.config import Config, make_config

SIMULATED = ("few_shot", "repeats", "rollouts")
"""Settings of an evaluation that are for held-out agents, of which a network has none."""


def networked(config: Config, seed: int | None = None) -> Config:
    """The config of one training run over a network: its first seed, or the one that is asked for."""
    if seed is not None and seed not in config.seeds:
        raise UserError(f"the config has no seed {seed}; it has {', '.join(map(str, config.seeds))}")
    if not config.parts.algorithm.federated:
        raise UserError(f"{config.algorithm['name']} sends nothing: its agents need no network")
    if not sends_messages(config.parts.algorithm, config.parts.policy):
        raise UserError(
            f"agents of {config.algorithm['name']} send something else than what they are sent, which is not taken "
            "over a network yet: simulate it, or take fedavg-pg"
        )
    if config.attack is not None:
        raise UserError("an [attack] is for simulations; leave it out of a config for real agents")
    if config.control_variate is not None:
        raise UserError("a [control_variate] is for simulations yet: leave it out of a config for real agents")
    table: dict[str, Any] = tomllib.loads(config.to_toml())
    table["seeds"] = [config.seeds[0] if seed is None else seed]
    table["evaluation"] = {key: value for key, value in table["evaluation"].items() if key not in SIMULATED}
    if isinstance(table["start"], str):
        table["start"] = table["seeds"][0]
    return make_config(table)


def sends_messages(algorithm: Algorithm, policy: Any) -> bool:
    """Whether an upload is a changed message, or less of one."""
    if algorithm.uploads_may_be_empty:
        return False
    first = lambda: algorithm.init(policy.init(jax.random.key(0)))[0].message  # noqa: E731
    message, upload = jax.eval_shape(first), jax.eval_shape(lambda: algorithm.unchanged_upload(first()))
    return len({jax.tree.structure(message), jax.tree.structure(upload)}) == 1


def config_of(text: str) -> Config:
    """The config that a plan carries."""
    try:
        return make_config(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the plan is not valid TOML: {error}") from error
