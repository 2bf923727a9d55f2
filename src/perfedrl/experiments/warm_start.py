"""The parameters that a personalization starts from: a run's initialization, or a saved policy that goes on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from perfedrl.errors import UserError
from perfedrl.experiments.config import whole
from perfedrl.experiments.files import named_leaves
from perfedrl.experiments.store import Run
from perfedrl.saved_policies.descriptions import SightedDescription
from perfedrl.saved_policies.file import SavedPolicy, load_policy
from perfedrl.saved_policies.spaces import Spaces
from perfedrl.types import Params


class WarmStart(NamedTuple):
    """Parameters to start from, the adaptations that they went through, and the agent that they were adapted to.

    `attempts` counts the adaptations that were tried so far, also those after which the start was kept. `spaces` are
    those that the parameters were trained for, where they are known, and `where` names the policy in messages.
    `message` is that of a run with several initializations, of which `params` is the one with most members.
    """

    params: Params
    earlier: Sequence[Mapping[str, Any]] = ()
    attempts: int = 0
    choice: Mapping[str, Any] | None = None
    spaces: Spaces | None = None
    where: str = ""
    warnings: Sequence[str] = ()
    message: PyTree | None = None

    def check_spaces(self, task: Any) -> None:
        """Reject the task of an agent with other observations or actions, such as actions in other units."""
        agent: Spaces | None = None if self.spaces is None else task.environment_spaces
        if self.spaces is None or agent is None:
            return
        for what, own, other in (
            ("observations", self.spaces.observations, agent.observations),
            ("actions", self.spaces.actions, agent.actions),
        ):
            if own != other:
                raise UserError(f"{self.where} does not fit the agent: its {what} are {own!r}, the agent's {other!r}")


def warm_start(run: Run, replica: int, start: str | Path | SavedPolicy | None) -> WarmStart:
    """Return the parameters of one of the run's seeds, or those of a saved policy that fits the run's policy."""
    shared = jax.tree.map(lambda x: x[replica], run.params)
    if start is None:
        chooses = run.config.experiment.algorithm.averages_by_choice
        return WarmStart(shared, message=jax.tree.map(lambda x: x[replica], run.message) if chooses else None)
    saved, where = (start, "the policy") if isinstance(start, SavedPolicy) else (load_policy(start), str(start))
    description = run.config.experiment.policy.description
    sees = isinstance(saved.description, SightedDescription)
    if sees != (run.config.experiment.fleet.sight is not None):
        first, second = ("sees", "do not") if sees else ("does not see", "do")
        raise UserError(f"{where} does not fit the run: it {first} numbers of its task, and the run's agents {second}")
    # An agent that goes on sees the numbers of its own task, which may be another.
    own = saved.description.policy if isinstance(saved.description, SightedDescription) else saved.description
    if own != description:
        raise UserError(f"{where} does not fit the run: its policy is {own!r}, the run's {description!r}")
    expected = named_leaves(shared)
    if {name: x.shape for name, x in expected.items()} != {name: x.shape for name, x in saved.params.items()}:
        raise UserError(f"{where} does not fit the run: the names and shapes of its parameters differ from the run's")
    leaves = [np.asarray(saved.params[name], x.dtype) for name, x in expected.items()]
    params = jax.tree.unflatten(jax.tree.structure(shared), leaves)
    earlier = saved.about.get("adaptations")
    if not isinstance(earlier, list) or not all(isinstance(x, dict) for x in earlier):
        raise UserError(f"{where} does not say what adapted it; write it again with `perfedrl personalize`")
    attempts = saved.about.get("attempts", len(earlier))  # earlier versions did not count them
    if not whole(attempts) or not len(earlier) <= attempts < 2**32:
        raise UserError(f"{where} is damaged: attempts must be at least {len(earlier)}, got {attempts!r}")
    begin = WarmStart(params, earlier, attempts, spaces=saved.spaces, where=where)
    if saved.about.get("digest") == run.config.digest:
        return begin._replace(choice=known_choice(saved.about.get("choice")))
    origin = f"{where} comes from the run {saved.about.get('run')} and goes on in {run.folder.name}"
    return begin._replace(warnings=[origin])


def known_choice(choice: Any) -> Mapping[str, Any] | None:
    """Return the choice of an agent that a file has; None where it has none."""
    kinds = {"goal": list, "agent": int, "settings": dict}
    if not isinstance(choice, dict) or not choice:
        return None
    return choice if all(isinstance(x, kinds.get(name, ())) for name, x in choice.items()) else None
