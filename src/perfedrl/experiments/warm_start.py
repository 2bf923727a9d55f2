"""The parameters that a personalization starts from: a run's initialization, or a saved policy that goes on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from perfedrl.errors import UserError
from perfedrl.experiments.files import named_leaves
from perfedrl.experiments.store import Run
from perfedrl.saved_policies.file import SavedPolicy, load_policy
from perfedrl.types import Params


class WarmStart(NamedTuple):
    """Parameters to start from, the adaptations that they went through, and the agent that they were adapted to."""

    params: Params
    earlier: Sequence[Mapping[str, Any]] = ()
    choice: Mapping[str, Any] | None = None
    warnings: Sequence[str] = ()


def warm_start(run: Run, replica: int, start: str | Path | SavedPolicy | None) -> WarmStart:
    """Return the parameters of one of the run's seeds, or those of a saved policy that fits the run's policy."""
    shared = jax.tree.map(lambda x: x[replica], run.params)
    if start is None:
        return WarmStart(shared)
    saved, where = (start, "the policy") if isinstance(start, SavedPolicy) else (load_policy(start), str(start))
    description = run.config.experiment.policy.description
    if saved.description != description:
        raise UserError(f"{where} does not fit the run: its policy is {saved.description!r}, the run's {description!r}")
    expected = named_leaves(shared)
    if {name: x.shape for name, x in expected.items()} != {name: x.shape for name, x in saved.params.items()}:
        raise UserError(f"{where} does not fit the run: the names and shapes of its parameters differ from the run's")
    leaves = [np.asarray(saved.params[name], x.dtype) for name, x in expected.items()]
    params = jax.tree.unflatten(jax.tree.structure(shared), leaves)
    earlier = saved.about.get("adaptations")
    if not isinstance(earlier, list) or not all(isinstance(x, dict) for x in earlier):
        raise UserError(f"{where} does not say what adapted it; write it again with `perfedrl personalize`")
    if saved.about.get("digest") == run.config.digest:
        return WarmStart(params, earlier, known_choice(saved.about.get("choice")))
    origin = f"{where} comes from the run {saved.about.get('run')} and goes on in {run.folder.name}"
    return WarmStart(params, earlier, None, [origin])


def known_choice(choice: Any) -> Mapping[str, Any] | None:
    """Return the choice of an agent that a file has; None where it has none."""
    kinds = {"goal": list, "agent": int, "settings": dict}
    if not isinstance(choice, dict) or not choice:
        return None
    return choice if all(isinstance(x, kinds.get(name, ())) for name, x in choice.items()) else None
