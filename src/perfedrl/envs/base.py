"""What an environment is: one agent's MDP as a pytree with three methods."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, PyTree

from perfedrl.errors import UserError
from perfedrl.types import Array, Noise

State = PyTree[Any]

LONGEST_HORIZON = 1_000_000


@runtime_checkable
class Task(Protocol):
    """One agent's MDP. Array leaves are what may differ between agents; static fields are what a fleet shares.

    Written for one episode of one agent; callers `vmap`. All randomness comes in as uniforms on [0, 1), as many as
    the task says it needs, so an episode is a deterministic function of (parameters, task, uniforms): one call draws
    the uniforms of a whole batch, and two policies can be compared under common random numbers.

    A task may say more of an episode than its return: `outcomes(episode) -> {"success": ..., "distance": ...}`; of the
    actions it takes: `actions` (how many) or `action_size` (how long a vector); and of agents like it:
    `with_goal(goal)`; and for the theory's constants how large things get: `reward_bound`, `observation_bound`.
    Evaluation, neural policies, personalization and theory use what is there.
    """

    horizon: int
    """H: an episode has H + 1 decisions."""
    discount: float

    @property
    def reset_noise(self) -> int:
        """Uniforms that `reset` needs."""
        ...

    @property
    def step_noise(self) -> int:
        """Uniforms that each `step` needs."""
        ...

    def reset(self, u: Noise) -> State: ...

    def observe(self, state: State) -> PyTree[Array]: ...

    def step(
        self, state: State, action: PyTree[Array], u: Noise
    ) -> tuple[State, Float[Array, ""], Bool[Array, ""] | bool]:
        """Return the next state, the reward of this step, and whether the episode is over."""
        ...


@runtime_checkable
class PlayedTask(Protocol):
    """One agent whose world JAX cannot trace (a Gymnasium environment, a robot): it brings a sampler of its own.

    It says of its actions and observations what a policy must know: `actions` or `action_size`, `observation_size`.
    Like a `Task` it may have `outcomes`; `settings`, a table of what it is made with; and `close`, which is called when
    work ends, also by an error.
    """

    @property
    def horizon(self) -> int: ...

    @property
    def discount(self) -> float: ...

    def sampler(self, policy: Any) -> Any:
        """What plays under a policy: an object with `traceable = False` and `sample(params, key, m) -> Trajectory`."""
        ...

    def outline(self, m: int) -> Any:
        """A batch of m made-up episodes, a Trajectory of the right shapes and types."""
        ...


@runtime_checkable
class DataTask(Protocol):
    """One agent that has examples instead of episodes: an objective of its own kind, the likelihood of its labels.

    Like a `Task` it says what a policy must know: `actions` (how many classes) and `observation_size`.
    """

    horizon: int
    """0: an example is a single decision."""
    discount: float
    examples: Any
    """What it learns from: `Examples`, inputs and labels."""
    test: Any
    """What it is measured on, and never learns from."""


def check_episode(horizon: int, discount: float, who: str = "") -> None:
    """Refuse a horizon or a discount that no MDP has."""
    if not 0 <= horizon <= LONGEST_HORIZON or horizon != int(horizon):
        raise UserError(f"{who}horizon must be a whole number >= 0 and <= {LONGEST_HORIZON}; it is {horizon}")
    if not 0 <= discount < 1:
        raise UserError(f"{who}discount must lie in [0, 1); it is {discount}")
