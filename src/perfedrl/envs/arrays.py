"""Fleets of finite MDPs from a user's arrays, in the config or in an .npz file."""

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perfedrl.envs.fleet import Fleet, fleet
from perfedrl.envs.new_agents import NewAgents, Settings
from perfedrl.envs.tabular import TabularMDP, as_array, check
from perfedrl.errors import UserError


def arrays(
    horizon: int,
    discount: float,
    file: str = "",
    P: Sequence | None = None,  # noqa: N803
    r: Sequence | None = None,
    mu: Sequence | None = None,
    held_out: int = 0,
    sha256: str = "",
) -> Fleet:
    """Agents given by P[n,S,A,S], r[n,S,A] and mu[n,S], written out or in an .npz file; the last `held_out` stay out.

    `sha256` pins the content of the file. It is added to a config when the config is loaded, so that a run is bound to
    the data it was trained on.
    """
    given: dict[str, Any] = {"P": P, "r": r, "mu": mu}
    if file:
        if any(x is not None for x in given.values()):
            raise UserError("give the arrays P, r and mu either in the config or in a file, not both")
        if sha256 and sha256 != file_digest(file):
            raise UserError(f"{file} has changed since this config was made: expected sha256 {sha256}")
        given = _read(file)

    def make(like: TabularMDP, settings: Settings) -> TabularMDP:
        return one_agent(str(settings["file"]), like)

    hints = {"file": "an .npz file with P[S,A,S], r[S,A] and mu[S] of one agent"}
    family = NewAgents(make, [{}] * len(np.atleast_1d(given["mu"])), {"file": ""}, hints)
    return tabular_fleet(given["P"], given["r"], given["mu"], horizon, discount, held_out, family)


def one_agent(file: str, like: TabularMDP) -> TabularMDP:
    """Make the agent whose arrays an .npz file has, with the states and actions of another."""
    if not file:
        raise UserError("a new agent of arrays needs file=..., an .npz file with its P[S,A,S], r[S,A] and mu[S]")
    parts = {name: as_array(name, x) for name, x in _read(file).items() if x is not None}
    if missing := [name for name in ("P", "r", "mu") if name not in parts]:
        raise UserError(f"{file} lacks the array {missing[0]}; a new agent needs P[S,A,S], r[S,A] and mu[S]")
    if parts["r"].shape != like.r.shape:
        raise UserError(f"{file}: expected {list(like.r.shape)} states and actions, got {list(parts['r'].shape)}")
    return TabularMDP(parts["P"], parts["r"], parts["mu"], like.horizon, like.discount)


def tabular_fleet(
    P,  # noqa: N803
    r,
    mu,
    horizon: int,
    discount: float,
    held_out: int = 0,
    family: NewAgents | None = None,
) -> Fleet:
    """Make a fleet from stacked arrays P[n,S,A,S], r[n,S,A], mu[n,S]; errors name the agent."""
    stacked = {name: _array(name, x) for name, x in (("P", P), ("r", r), ("mu", mu))}
    n = len(stacked["P"])
    for name, x in stacked.items():
        if len(x) != n:
            raise UserError(f"P describes {n} agents but {name} describes {len(x)}")
    if not 0 <= held_out < n:
        raise UserError(f"held_out must leave at least one of the {n} agents to train; it is {held_out}")
    mdps = []
    for i in range(n):
        parts = stacked["P"][i], stacked["r"][i], stacked["mu"][i]
        check(*parts, horizon, discount, agent=i)
        mdps.append(TabularMDP(*parts, horizon, discount))
    return fleet(mdps[: n - held_out], mdps[n - held_out :], family)


def file_digest(file: str) -> str:
    """Return the sha256 of a file's content."""
    path = Path(file)
    if not path.is_file():
        raise UserError(f"there is no file {file} (looked for it in {Path.cwd()})")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _array(name: str, x) -> np.ndarray:
    if x is None:
        raise UserError(f"the fleet needs the array {name} (P[n,S,A,S], r[n,S,A], mu[n,S])")
    array = as_array(name, x)
    expected = {"P": 4, "r": 3, "mu": 2}[name]
    if array.ndim != expected:
        raise UserError(f"{name} must have {expected} axes, the first one over agents; it has {array.ndim}")
    return array


def _read(file: str) -> dict[str, np.ndarray | None]:
    file_digest(file)
    try:
        with np.load(file, allow_pickle=False) as data:
            return {name: data.get(name) for name in ("P", "r", "mu")}
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, AttributeError) as error:
        raise UserError(f"{file} is not an .npz file of plain arrays (made with numpy.savez, say)") from error
