"""Training for a diagnosis: shared policies, specialists, an initialization for one step, and agents that learn alone.

Where agents are simulated or played, every policy is trained by clipped steps with generalized advantages, whose step
sizes do not depend on the units of rewards, so that one setting serves all fleets. Where returns are exact, plain
gradient steps of several sizes are tried, and agents are measured that the training left out: an initialization can fit
the few agents that it is trained on, and sizes that are chosen by these agents fit them too.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms import Algorithm, FedPPO, FineTuned, LocalPG, PerFedAvgPG, ProMP
from perfedrl.envs import Fleet
from perfedrl.envs import fleet as make_fleet
from perfedrl.errors import DivergenceError
from perfedrl.estimators import Sampled
from perfedrl.estimators.advantages import GAE
from perfedrl.key_domains import EVALUATION
from perfedrl.rollout import sampler
from perfedrl.simulation.evaluation import Evaluation, MonteCarlo, episode_outcomes, monte_carlo
from perfedrl.simulation.evaluation import exact as exact_evaluation
from perfedrl.simulation.experiment import PER_SEED, Experiment, StartParameters
from perfedrl.simulation.observers import Observer, announce
from perfedrl.simulation.run_state import FleetState, RunState
from perfedrl.simulation.simulator import Simulation, every_few, shared_params
from perfedrl.types import Array, Params

FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Factors of the given step sizes that are tried where returns are exact."""
TUNING_SIZES = (0.3, 1.0, 3.0)
"""Step sizes of fine-tuning that are tried elsewhere, in units of normalized advantages."""
TUNING_STEPS = 10
"""Steps of fine-tuning, which share an agent's trajectories."""
OWN_SEEDS = 1000
"""Distance of the seeds of agents that train alone; larger than the number of seeds."""
BATCH, PAIR = 20, 40
"""Trajectories of a local step: of one policy, and of an initialization, before and after its step."""
RATE = 0.01
"""Adam's rate, which falls to a twentieth over the rounds."""
EVALUATIONS = 5
"""How often an agent that learns alone is measured on its way."""
REPEATS = 2
"""How often each agent personalizes from each budget."""
FOLDS = 4
"""Parts of the agents that are left out in turn where returns are exact; as many as agents where these are fewer."""
MEASURED, CHOSEN_BY = 0, 1
"""Moments of evaluation with episodes of their own: policies are not chosen by the episodes that measure them."""


@dataclass(frozen=True)
class Training:
    """The settings of all training: a fleet without unseen agents, a policy, and the budget of each agent.

    `step_sizes` are alpha and beta of fleets whose returns are exact; None for others.
    """

    fleet: Fleet
    policy: Any
    seeds: Sequence[int]
    trajectories: int
    budgets: tuple[int, ...]
    episodes: int
    step_sizes: tuple[float, float] | None
    observers: Sequence[Observer] = ()

    @property
    def sampled(self) -> Sampled:
        """Agents that learn from trajectories."""
        if self.step_sizes is not None:
            return Sampled(self.policy)
        return Sampled(self.policy, advantage=GAE(times_variance=self.policy.variance is not None))

    @property
    def evaluation(self) -> Evaluation:
        """Measures returns, and adapts from each of the budgets."""
        if self.step_sizes is not None:
            return exact_evaluation(self.fleet, self.sampled, self.budgets[0], self.budgets, REPEATS)
        return monte_carlo(self.fleet, self.sampled, self.budgets[0], self.episodes, self.budgets, REPEATS)

    @property
    def digest(self) -> str:
        """Identifies what is measured: the agents, the policy, and all settings."""
        train = self.fleet.train
        agents = [np.asarray(x).tobytes() for x in jax.tree.leaves(train)] if self.fleet.traceable else [repr(train)]
        made: tuple = (BATCH, PAIR, RATE, EVALUATIONS, REPEATS, FACTORS, TUNING_SIZES, TUNING_STEPS)
        if self.step_sizes is not None:
            made += (FOLDS,)
        settings = self.policy, tuple(self.seeds), self.trajectories, self.budgets, self.episodes, self.step_sizes
        return hashlib.sha256(repr((agents, str(jax.tree.structure(train)), settings, made)).encode()).hexdigest()

    def check(self) -> None:
        """Reject what does not fit into memory and environments that break their contract, before any work."""
        simulation = self.simulation(self.learner()[0] if self.step_sizes is None else LocalPG(1.0))
        simulation.check_memory(simulation.start())
        for warning in self.fleet.check():
            log.warning("%s", warning)

    def learner(self) -> tuple[Algorithm, int]:
        """The algorithm that trains one policy, and its number of rounds."""
        rounds = max(1, self.trajectories // BATCH)
        return FedPPO(1.0, RATE, m=BATCH, anneal=rounds), rounds

    def simulation(self, algorithm: Algorithm, agent: int | None = None, start: Params | None = None) -> Simulation:
        """A simulation of the fleet, or of one of its agents, from given parameters or from each seed's own.

        An agent alone has seeds of its own: it is agent 0 of its fleet, as all others are of theirs.
        """
        fleet = self.fleet if agent is None else some_agents(self.fleet, [agent])
        seeds = [seed + (0 if agent is None else OWN_SEEDS * (agent + 1)) for seed in self.seeds]
        given = PER_SEED if start is None else StartParameters("the shared policy", tuple(seeds), start)
        return Simulation(Experiment(fleet, self.policy, algorithm, self.sampled, self.evaluation, start=given), seeds)

    def states(
        self, simulation: Simulation, rounds: int, evaluations: int, label: str
    ) -> Iterator[tuple[int, FleetState]]:
        """The rounds at which training pauses, with the state there, from the start to the end.

        Training that starts from a trained policy has random numbers of its own, those of later rounds.
        """
        state, done = simulation.start(), 0
        first = 0 if simulation.experiment.start == PER_SEED else rounds
        for observer in self.observers:
            observer.on_start(RunState(done, None, None, label, rounds, label))
        yield done, state
        for stop in every_few(rounds, max(1, rounds // evaluations)):
            state, done = simulation.advance(state, first + done, stop - done), stop
            if not all(np.isfinite(x).all() for x in jax.tree.leaves(state.server.message)):
                raise DivergenceError(f"the training of {label} diverged; scale the rewards or the observations")
            announce(self.observers, RunState(done, None, None, label, rounds, label))
            yield done, state

    def trained(self, simulation: Simulation, rounds: int, label: str) -> FleetState:
        """The state after all rounds."""
        *_, (_, state) = self.states(simulation, rounds, EVALUATIONS, label)
        return state

    # What is trained.

    def shared_policy(self) -> tuple[Params, dict[str, np.ndarray]]:
        """Train one policy for all agents; return its parameters by seed, and returns before and after training.

        Specialists train on from these parameters. What is measured is the policy after as much further training on all
        agents, so that a specialist is not ahead by its number of trajectories.
        """
        algorithm, rounds = self.learner()
        simulation = self.simulation(algorithm)
        before = returns(simulation, simulation.start(), MEASURED)
        params = shared_params(algorithm, self.trained(simulation, rounds, "one policy for all"))
        longer = self.simulation(algorithm, start=params)
        state = self.trained(longer, rounds, "one policy for all, as long again")
        after = {name: returns(longer, state, moment) for name, moment in MOMENTS.items()}
        return params, {"untrained": before, **after}

    def specialist(self, agent: int, shared: Params) -> dict[str, np.ndarray]:
        """Train a policy of one agent's own, from scratch and from the shared policy; return returns on all agents.

        "alone" is the agent's own return on its way from scratch, "from ..." that of both policies at the end.
        """
        algorithm, rounds = self.learner()
        everyone = self.simulation(algorithm)
        found: dict[str, np.ndarray] = {}
        for origin, start in {"scratch": None, "shared": shared}.items():
            simulation, curve, spent = self.simulation(algorithm, agent, start), [], []
            for done, state in self.states(simulation, rounds, EVALUATIONS, f"agent {agent} from {origin}"):
                if origin == "scratch":
                    curve.append(returns(simulation, state, MEASURED)[:, 0])
                    spent.append(algorithm.trajectories_after(done))
            for name, moment in MOMENTS.items():
                found[f"{name} from {origin}"] = returns(everyone, state, moment)
            if origin == "scratch":
                found |= {"alone": np.stack(curve, axis=1), "spent": np.asarray(spent)}
        return found

    def initialization(self) -> dict[str, np.ndarray]:
        """Train an initialization for one gradient step; return the returns after the step, by budget.

        Where returns are exact, the best of several step sizes is taken, by other trajectories than those measured, and
        every agent is measured after a training that left it out.
        """
        if self.step_sizes is None:
            rounds = max(1, self.trajectories // PAIR)
            promp = ProMP(1.0, RATE, anneal=rounds, learn_alpha="per-parameter")
            return {"adapted": self.adapted(promp, rounds)[0]}
        alpha, beta = self.step_sizes
        how: dict[str, Any] = {"variant": "first-order", "m_in": BATCH // 2, "m_out": BATCH // 2}
        tried = (PerFedAvgPG(alpha * x, beta * y, **how) for x in FACTORS for y in FACTORS[::2])
        return {"adapted": self.best_adapted(tried)}

    def fine_tuning(self) -> dict[str, np.ndarray]:
        """Train one policy for all; return the returns after several steps from it, of the best of several sizes."""
        if self.step_sizes is not None:
            alpha, beta = self.step_sizes
            return {
                "tuned": self.best_adapted(
                    FineTuned(alpha * x, beta * y, m=BATCH) for x in FACTORS for y in FACTORS[::2]
                )
            }
        rounds = self.learner()[1]
        # Training does not depend on alpha, and so is the same for all.
        simulations = [
            self.simulation(FedPPO(x, RATE, m=BATCH, anneal=rounds, fine_tuning_steps=TUNING_STEPS))
            for x in TUNING_SIZES
        ]
        state = self.trained(simulations[0], rounds, "one policy for all, to be fine-tuned")
        tried = []
        for simulation in simulations:
            with suppress(DivergenceError):
                tried.append(deployed(simulation, state, rounds))
        return {"tuned": best_of(tried)}

    def best_adapted(self, algorithms: Iterable[Algorithm]) -> Float[np.ndarray, "seed budget agent"]:
        """The returns after adaptation with the best of some algorithms, of agents that their training left out."""
        tried, parts = [], self.leaving_out()
        order = np.argsort([agent for left_out, _ in parts for agent in left_out])
        for algorithm in algorithms:
            rounds = max(1, self.trajectories // algorithm.trajectories_per_round)
            with suppress(DivergenceError):
                found = [training.adapted(algorithm, rounds) for _, training in parts]
                tried.append([np.concatenate(draw, axis=-1)[..., order] for draw in zip(*found, strict=True)])
        return best_of(tried)

    def leaving_out(self) -> list[tuple[list[int], "Training"]]:
        """Parts of the agents, each with the training on all others, which measures this part."""
        agents = range(self.fleet.agents)
        parts = [list(agents[i::FOLDS]) for i in range(min(FOLDS, len(agents)))]
        fleets = (some_agents(self.fleet, [i for i in agents if i not in part], part) for part in parts)
        return [(part, replace(self, fleet=fleet)) for part, fleet in zip(parts, fleets, strict=True)]

    def adapted(self, algorithm: Algorithm, rounds: int) -> list[Float[np.ndarray, "seed budget agent"]]:
        """Train, and return the returns after adaptation from two draws of trajectories."""
        simulation = self.simulation(algorithm)
        state = self.trained(simulation, rounds, "an initialization for adaptation")
        return deployed(simulation, state, rounds)

    def alone(self) -> dict[str, np.ndarray]:
        """Let every agent learn alone by plain gradient steps, where returns are exact; the best of several sizes."""
        assert self.step_sizes is not None
        tried = []
        for factor in FACTORS:
            algorithm = LocalPG(self.step_sizes[1] * factor, m=BATCH)
            simulation, curve, spent = self.simulation(algorithm), [], []
            rounds = max(1, self.trajectories // BATCH)
            with suppress(DivergenceError):
                for done, state in self.states(simulation, rounds, EVALUATIONS, "agents alone"):
                    curve.append(simulation.measure(state, done).after[:, 0])
                    spent.append(algorithm.trajectories_after(done))
                if np.isfinite(curve).all():
                    tried.append({"alone": np.stack(curve, axis=1), "spent": np.asarray(spent)})
        if not tried:
            raise DivergenceError("the agents' own training diverged: lower beta")
        return max(tried, key=lambda one: float(one["alone"][:, -1].mean()))

    def untrained(self) -> dict[str, np.ndarray]:
        """The returns of the policy that training starts from."""
        simulation = self.simulation(self.learner()[0] if self.step_sizes is None else LocalPG(1.0))
        return {"untrained": returns(simulation, simulation.start(), MEASURED)}


MOMENTS = {"measured": MEASURED, "chosen by": CHOSEN_BY}

log = logging.getLogger("perfedrl")


def deployed(simulation: Simulation, state: FleetState, rounds: int) -> list[Float[np.ndarray, "seed budget agent"]]:
    """The returns after an algorithm's adaptation, from two draws of trajectories: to measure, and to choose by."""
    found = [each.outcomes["return"] for x in (0, 1) if (each := simulation.deploy(state, rounds + x))]
    if not all(np.isfinite(x).all() for x in found):
        raise DivergenceError("adaptation diverged: lower alpha")
    return [np.asarray(x, float) for x in found]


def best_of(tried: Sequence[Sequence[np.ndarray]]) -> Float[np.ndarray, "seed budget agent"]:
    """The first draw of the settings whose second draw has the highest mean."""
    if not tried:
        raise DivergenceError("adaptation diverged with all step sizes that were tried: scale the rewards")
    return max(tried, key=lambda both: float(both[1].mean()))[0]


def some_agents(fleet: Fleet, agents: Sequence[int], held_out: Sequence[int] = ()) -> Fleet:
    """A fleet of some of the training agents; others of them may be its unseen agents."""
    train, unseen = (make_fleet([fleet.task(i) for i in part]).train if part else None for part in (agents, held_out))
    return Fleet(train, unseen, None, fleet.sight)


def returns(simulation: Simulation, state: FleetState, moment: int) -> Float[np.ndarray, "seed agent"]:
    """The return of every agent under the shared policy of a state."""
    how = learning_return if moment == CHOSEN_BY else shared_return
    return np.asarray(simulation.each_agent(how, state, EVALUATION + moment, held_out=False), float)


def shared_return(
    evaluation: Evaluation, algorithm: Algorithm, message: PyTree, _: PyTree, task: Any, key: PRNGKeyArray
) -> Float[Array, ""]:
    """One agent's return under the shared policy, where it is measured."""
    return evaluation.outcomes(task, algorithm.shared(message), key)["return"]


def learning_return(
    evaluation: MonteCarlo, algorithm: Algorithm, message: PyTree, _: PyTree, task: Any, key: PRNGKeyArray
) -> Float[Array, ""]:
    """One agent's return under the shared policy, where it learns: policies are not chosen by data of tests."""
    episodes = sampler(task, evaluation.agent.policy).sample(algorithm.shared(message), key, evaluation.episodes)
    return jnp.mean(episode_outcomes(task, episodes)["return"])
