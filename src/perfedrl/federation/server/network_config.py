"""The config of a networked run: an experiment's config with one seed and without what only a simulator has."""

import tomllib
from pathlib import Path
from typing import Any

import jax
import tomli_w

from perfedrl.algorithms import Algorithm
from perfedrl.errors import UserError
from perfedrl.experiments.build import SEES, unwrapped_algorithm, wrap
from perfedrl.experiments.config import Config, parse_config
from perfedrl.experiments.settings import validated
from perfedrl.experiments.start_parameters import StartTable
from perfedrl.experiments.store import read_provenance
from perfedrl.federation.environment_report import (
    PLAN_TABLE,
    EnvironmentReport,
    agents_bring_environments,
    agents_of,
    checked_report,
    with_report,
)

HELD_OUT_SETTINGS = ("few_shot", "repeats", "rollouts")
"""Settings of an evaluation that concern held-out agents, which a network does not have."""


def networked(config: Config, seed: int | None = None) -> Config:
    """Derive the config of one networked run: with the given seed, or the config's first.

    A config that is one already is returned as it is, with the experiment it has built. Where agents bring their
    environments, no experiment is built: `check_uploads` follows when their report is known.
    """
    if seed is not None and seed not in config.seeds:
        raise UserError(f"the config has no seed {seed}; it has {', '.join(map(str, config.seeds))}")
    if not unwrapped_algorithm(config).federated:
        raise UserError(f"{config.algorithm['name']} sends nothing, so its agents need no network: use perfedrl train")
    if SEES in config.policy:
        raise UserError("[policy] sees is for simulations only so far; leave it out of a config for real agents")
    if not agents_bring_environments(config):
        check_uploads(config)
    if config.attack is not None:
        raise UserError("an [attack] is for simulations; leave it out of a config for real agents")
    if config.control_variate is not None:
        raise UserError("a [control_variate] is for simulations only so far; leave it out of a config for real agents")
    if config.keep != "last" or isinstance(config.start, StartTable):
        key = "keep" if config.keep != "last" else "the run in start"
        raise UserError(f"{key} is for simulations only so far; leave it out of a config for real agents")
    table: dict[str, Any] = tomllib.loads(config.to_toml())
    table["seeds"] = [config.seeds[0] if seed is None else seed]
    table["evaluation"] = {key: value for key, value in table["evaluation"].items() if key not in HELD_OUT_SETTINGS}
    if isinstance(table["start"], str):
        table["start"] = table["seeds"][0]
    derived = validated(Config, table, "config")
    return config if derived.to_toml() == config.to_toml() else derived


def check_uploads(config: Config) -> None:
    """Reject algorithms whose uploads a server cannot check against its messages."""
    if not sends_messages(config.experiment.algorithm, config.experiment.policy):
        raise UserError(
            f"uploads of {config.algorithm['name']} differ in structure from its messages, which is not supported over "
            "a network yet: simulate it, or use fedavg-pg"
        )


def least_agents(config: Config) -> int:
    """The least number of agents that the config's algorithm needs in a round."""
    return wrap(config, unwrapped_algorithm(config), agents_of(config)).least_agents


def plan_text(config: str, report: EnvironmentReport | None) -> str:
    """What agents are sent of a run: its config and, where agents bring their environments, the report of these."""
    return config if report is None else f"{config}\n{tomli_w.dumps({PLAN_TABLE: report.table()})}"


def trained_config(folder: Path, config: Config) -> Config:
    """The config of a finished run, built on the report of its agents if they brought their environments."""
    reported = read_provenance(folder).get("federation", {}).get(PLAN_TABLE)
    return config if reported is None else with_report(config, checked_report(reported))


def sends_messages(algorithm: Algorithm, policy: Any) -> bool:
    """Whether uploads have the structure of the message, or of a part of it."""
    if algorithm.uploads_may_be_empty:
        return False

    def message() -> Any:
        return algorithm.init(policy.init(jax.random.key(0)))[0].message

    sent, uploaded = jax.eval_shape(message), jax.eval_shape(lambda: algorithm.unchanged_upload(message()))
    return len({jax.tree.structure(sent), jax.tree.structure(uploaded)}) == 1


def config_of(text: str) -> Config:
    """Read the config in a run's specification.

    Its digests of own code are those of the specification, also where it has none: a job may find modules that the
    process which wrote it did not, and must save the run in the folder in which that process expects it.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the plan is not valid TOML: {error}") from error
    return parse_config(table).model_copy(update={"code": table.get("code")})
