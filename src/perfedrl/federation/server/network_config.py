"""The config of a networked run: an experiment's config with one seed, an aggregation, and nothing for simulators."""

import tomllib
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import tomli_w

from perfedrl.algorithms import Algorithm, Robust
from perfedrl.algorithms.composition import Composition, excludes
from perfedrl.algorithms.wrapper import same_shape
from perfedrl.envs import Fleet, played_in_python
from perfedrl.errors import UserError
from perfedrl.experiments.build import PLAIN_MEAN, SEES, make_fleet, unwrapped_algorithm, wrap
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


DEFAULT_AGGREGATION = MappingProxyType({"name": "geometric-median"})
"""What a network takes where the config has no [aggregation]; it withstands less than half of the agents."""
FEWEST_AGENTS = 3
"""The number of agents in a round from which on a majority can outvote one of them."""


def networked(config: Config, seed: int | None = None) -> Config:
    """Derive the config of one networked run: with the given seed, or the config's first, and with an [aggregation].

    A config that is one already is returned as it is, with the experiment it has built. Where agents bring their
    environments, no experiment is built: `check_uploads` follows when their report is known.
    """
    if seed is not None and seed not in config.seeds:
        raise UserError(f"the config has no seed {seed}; it has {', '.join(map(str, config.seeds))}")
    if not unwrapped_algorithm(config).federated:
        raise UserError(f"{config.algorithm['name']} sends nothing, so its agents need no network: use perfedrl train")
    if SEES in config.policy:
        raise UserError("[policy] sees is for simulations only so far; leave it out of a config for real agents")
    if config.attack is not None:
        raise UserError("an [attack] is for simulations; leave it out of a config for real agents")
    table: dict[str, Any] = tomllib.loads(config.to_toml())
    table["seeds"] = [config.seeds[0] if seed is None else seed]
    table["evaluation"] = {key: value for key, value in table["evaluation"].items() if key not in HELD_OUT_SETTINGS}
    if isinstance(table["start"], str):
        table["start"] = table["seeds"][0]
    if isinstance(table["start"], dict):
        table["start"]["path"] = str(Path(table["start"]["path"]).resolve())  # the server's job runs in another folder
    derived = validated(Config, table, "config")
    if derived.aggregation is None:
        derived = with_default_aggregation(derived)
    elif derived.to_toml() == config.to_toml():
        derived = config
    if not agents_bring_environments(derived):
        check_uploads(derived)
    return derived


def with_default_aggregation(config: Config) -> Config:
    """The config with the aggregation that a network takes where none is named; its fleet is made once."""
    fleet: Fleet | None = None if played_in_python(config.fleet) else make_fleet(config)
    aggregation, _ = default_aggregation(config, agents_of(config) if fleet is None else fleet.agents)
    chosen = parse_config({**config.table, "aggregation": aggregation})
    return chosen if fleet is None else chosen.with_fleet(fleet)


def default_aggregation(config: Config, agents: int) -> tuple[dict[str, Any], str]:
    """The aggregation over a network of so many agents where the config names none, and the reason."""
    algorithm, name = unwrapped_algorithm(config), config.algorithm["name"]
    taking_part = max(1, round(config.participation * agents))
    why = None
    if taking_part < FEWEST_AGENTS:
        why = f"where fewer than {FEWEST_AGENTS} agents take part in a round, no majority outvotes a hostile one"
    elif excludes(Robust, Composition(algorithm, ())):
        why = f"no other aggregation can take the place of the one in {name}"
    elif config.control_variate is not None:
        why = "a control variate is the mean of the agents'"
    elif not server_class(algorithm).__module__.startswith("perfedrl."):
        why = f"{name} has a server step of its own, which may need every upload"
    if why is not None:
        return dict(PLAIN_MEAN), why
    return dict(DEFAULT_AGGREGATION), "a minority of hostile agents cannot move it far"


def aggregation_sentence(config: Config, derived: Config) -> str:
    """Say which aggregation a networked run has, and why; `config` is what the user wrote, `derived` its network's."""
    chosen = derived.aggregation or PLAIN_MEAN
    name = chosen["name"]
    combined = f"uploads are combined by their {name.replace('-', ' ')}"
    if config.aggregation is not None:
        return f"{combined}, as the config says"
    default, why = default_aggregation(derived, agents_of(derived))
    if name != default["name"]:
        return f"{combined}, as when this run began; --restart begins it anew with {default['name']}"
    other = "" if name == "mean" else '; [aggregation] name = "mean" in the config takes their mean'
    return f"{combined}: {why}{other}"


def server_class(algorithm: Algorithm) -> type:
    """The class in which an algorithm's server step is defined."""
    return next(kind for kind in type(algorithm).__mro__ if "server" in vars(kind))


def with_plain_mean(config: Config) -> Config:
    """The config with the mean as its aggregation; its digest is that of a config without the table."""
    return parse_config({**config.table, "aggregation": dict(PLAIN_MEAN)})


def check_uploads(config: Config) -> None:
    """Reject algorithms whose uploads a server cannot check, since it does not know what they look like."""
    experiment, name = config.experiment, config.algorithm["name"]
    if isinstance(config.start, StartTable) and agents_keep_start(config):
        raise UserError(
            f"agents of {name} begin with the start parameters, which only the server has: set start to a number"
        )
    if config.keep == "best" and jax.tree.leaves(jax.eval_shape(lambda: experiment.initial_states(0)[1])):
        raise UserError(
            f'agents of {name} have states of their own, which the server cannot keep: leave keep = "best" out'
        )
    if experiment.algorithm.asynchronous and experiment.participants < experiment.fleet.agents:
        raise UserError(f"agents of {name} all work all the time: leave participation out of a config for real agents")
    if experiment.algorithm.uploads_may_be_empty and not experiment.algorithm.asynchronous:
        raise UserError(
            f'agents of {name} with simulated delays send nothing in some rounds: set delays = "none", since agents in '
            "a network take the time they take"
        )

    def both() -> Any:
        message = experiment.initial_states(0)[0].message
        return experiment.algorithm.unchanged_upload(message), experiment.outlined_client()(jax.random.key(0))[0]

    if not same_shape(*jax.eval_shape(both)):
        raise UserError(
            f"uploads of {name} differ in structure from its `unchanged_upload`, with which a server compares them: "
            "define that member (algorithms/base.py), or simulate it"
        )


def agents_keep_start(config: Config) -> bool:
    """Whether the first state of an agent holds the parameters that training starts from."""
    given = config.experiment
    states = [
        x.initial_states(x.start_number(config.seeds[0]))[1] for x in (given, replace(given, start=config.seeds[0]))
    ]
    return any(not np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, states), strict=True))


def least_agents(config: Config) -> int:
    """The least number of agents that the config's algorithm needs in a round."""
    return wrap(config, unwrapped_algorithm(config), agents_of(config)).least_agents


def plan_text(config: str, report: EnvironmentReport | None) -> str:
    """What agents are sent of a run: its config and, where agents bring their environments, the report of these.

    Parameters to start from are the server's: agents see them in its messages, and a plan names no files.
    """
    table = tomllib.loads(config)
    if isinstance(table.get("start"), dict):
        config = tomli_w.dumps({**table, "start": table["seeds"][0]})
    return config if report is None else f"{config}\n{tomli_w.dumps({PLAN_TABLE: report.table()})}"


def trained_config(folder: Path, config: Config) -> Config:
    """The config of a finished run, built on the report of its agents if they brought their environments."""
    reported = read_provenance(folder).get("federation", {}).get(PLAN_TABLE)
    return config if reported is None else with_report(config, checked_report(reported))


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
