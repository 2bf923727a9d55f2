"""From what agents say of themselves to the history of a run."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from perfedrl.federation.frames import BadFrame, decode
from perfedrl.simulation.history import History
from perfedrl.simulation.simulator import RETURNS, Simulation

MOST_OUTCOMES = 64


def outcomes_in(data: bytes | None, kind: str = "outcomes") -> dict[str, float] | None:
    """The numbers in an agent's answer, such as "after.return"; None where it gives none, or not as it should."""
    if data is None:
        return None
    try:
        frame = decode(data)
    except BadFrame:
        return None
    scalars = {name: x for name, x in frame.tensors.items() if x.shape == () and x.dtype == np.float64}
    fine = 0 < len(scalars) <= MOST_OUTCOMES and all(np.isfinite(x) for x in scalars.values())
    if frame.kind != kind or len(scalars) < len(frame.tensors) or not fine:
        return None
    return {name: float(x) for name, x in scalars.items()}


def epsilon_in(data: bytes) -> float | None:
    """The privacy loss that an agent reports of itself, if it is one."""
    try:
        said = float(decode(data).fields.get("epsilon", "nan"))
    except (BadFrame, ValueError):
        return None
    return said if 0 <= said < float("inf") else None


def kinds_of(simulation: Simulation) -> list[str]:
    """What agents of this world say of an evaluation: "before.return", "after.success" and so on."""
    evaluation, key = simulation.evaluation, jax.random.key(0)
    assert evaluation is not None
    names = jax.eval_shape(evaluation.outcomes, simulation.fleet.task(0), simulation.policy.init(key), key)
    return [f"{when}.{name}" for when in ("before", "after") for name in sorted(names)]


def history_of(
    said: Mapping[str, Mapping[str, float]], names: Sequence[str], round_: int, simulation: Simulation
) -> History:
    """The history of a single evaluation: of what an agent did not say, not a number; what else it said is dropped."""
    arrays = {
        kind: np.array([[[said.get(name, {}).get(kind, np.nan) for name in names]]]) for kind in kinds_of(simulation)
    }
    nobody = np.zeros((1, 1, 0))
    returns = {when: arrays.pop(f"{when}.return", nobody) for when in RETURNS}
    return History(
        seeds=np.asarray(simulation.seeds),
        rounds=np.asarray([round_]),
        **simulation.cost_after(round_),
        **returns,
        outcomes=arrays,
    )
