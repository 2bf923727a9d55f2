"""Files of policies: safetensors with a description of the policy, its spaces and its history as metadata."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from perfedrl.errors import UserError
from perfedrl.saved_policies.decisions import Decisions
from perfedrl.saved_policies.descriptions import Description, Parameters
from perfedrl.saved_policies.spaces import Spaces

FORMAT = "1"
"""The version of the metadata's layout; files of other versions are rejected."""

MOST_BYTES = 1 << 30
TYPES = (np.float16, np.float32, np.float64)


class SavedPolicy:
    """A policy with its parameters, which acts without JAX.

    `description` is the table of its class, `params` are its arrays by name, `spaces` the environment's spaces where
    they are known, and `about` says where the policy came from: run, fleet, agent and what adapted it. `seed` seeds the
    draws of `act`.
    """

    def __init__(
        self,
        description: Description,
        params: Mapping[str, np.ndarray],
        spaces: Spaces | None = None,
        about: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ):
        self.description, self.params, self.spaces, self.about = description, dict(params), spaces, dict(about or {})
        size = description.observation_size
        if spaces is not None and spaces.observations.flat_size != size:
            raise UserError(f"the policy sees {size} numbers, the environment has {spaces.observations.flat_size}")
        for name, array in self.params.items():
            if array.dtype not in TYPES or not np.isfinite(array).all():
                raise UserError(f"the array {name!r} must hold finite numbers")
        _ = self._decisions
        self._rng = np.random.default_rng(seed)

    @cached_property
    def _decisions(self) -> Decisions:
        return self.description.decisions(Parameters(self.params))

    def act(self, obs: Any, *, deterministic: bool = False, rng: np.random.Generator | None = None) -> Any:
        """Decide for one observation of the environment, and return an action as the environment takes it.

        The action is drawn, as in training; with `deterministic` it is the most likely one. `rng` replaces the
        policy's own random numbers.
        """
        batch = self._seen(obs)[None]
        if deterministic:
            return self._in_units_of_the_environment(self._decisions.most_likely(batch))
        u = (self._rng if rng is None else rng).random((1, self._decisions.noise), np.float32)
        return self._in_units_of_the_environment(self._decisions.draw(batch, u))

    def _seen(self, obs: Any) -> np.ndarray:
        """Return an observation as the policy sees it: a vector, or the number of a state."""
        size = self.description.observation_size
        try:
            if size is None:
                return self._state(obs)
            vector = np.asarray(obs, np.float32) if self.spaces is None else self.spaces.observations.flatten(obs)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"the observation does not fit the policy: {error}") from error
        if vector.shape != (size,) or not np.isfinite(vector).all():
            what = "some of them not finite" if vector.shape == (size,) else f"shape {list(vector.shape)}"
            raise UserError(f"the observation does not fit the policy: expected {size} finite numbers, got {what}")
        return vector

    def _state(self, obs: Any) -> np.ndarray:
        state, states = np.asarray(obs), self.description.states or 0
        if state.shape != () or not np.issubdtype(state.dtype, np.integer) or not 0 <= state < states:
            raise ValueError(f"expected the number of a state, from 0 to {states - 1}, got {obs!r}")
        return state

    def _in_units_of_the_environment(self, actions: np.ndarray) -> Any:
        action = (actions if self.spaces is None else self.spaces.actions.to_environment()(actions))[0]
        return int(action) if np.ndim(action) == 0 and np.issubdtype(np.asarray(action).dtype, np.integer) else action

    def __repr__(self) -> str:
        origin = ", ".join(f"{key} {self.about[key]}" for key in ("run", "agent") if key in self.about)
        count = sum(array.size for array in self.params.values())
        return f"SavedPolicy({self.description!r}; {count} parameters{'; ' + origin if origin else ''})"


def encode(
    description: Description | None, params: Mapping[str, np.ndarray], spaces: Spaces | None, about: Mapping[str, Any]
) -> bytes:
    """Return the content of a policy's file; `about` maps names to what JSON can hold."""
    tables = {"policy": description, "spaces": spaces}
    known = {name: table.model_dump_json() for name, table in tables.items() if table is not None}

    def plain(x: Any) -> Any:
        return x.tolist() if isinstance(x, np.ndarray | np.generic) else str(x)

    return save(dict(params), metadata={"format": FORMAT, **known, "about": json.dumps(about, default=plain)})


def load_policy(path: str | Path, seed: int | None = None) -> SavedPolicy:
    """Open the file of a policy, such as `perfedrl personalize` writes; nothing of it is executed, and JAX is not used.

    `seed` seeds the draws of `act`, so that they can be repeated.
    """
    path = Path(path)
    params, tables = read(path)
    if tables.get("format") != FORMAT or "policy" not in tables:
        raise UserError(
            f"{path} does not describe its policy; write it again with `perfedrl personalize`, for a policy of the "
            "library or one of your own that has a `description`"
        )
    try:
        description = TypeAdapter(Description).validate_json(tables["policy"])
        spaces = Spaces.model_validate_json(tables["spaces"]) if "spaces" in tables else None
        about = TypeAdapter(dict[str, Any]).validate_json(tables.get("about", "{}"))
        return SavedPolicy(description, params, spaces, about, seed)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: the description of the policy is damaged: {where}: {first['msg']}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the arrays and the metadata of a file."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} is larger than {MOST_BYTES} bytes, which no policy is")
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not a readable file of a policy (safetensors)") from error
