"""A run of asynchronous agents again, in the simulator, with the recorded order of arrivals."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from perfedrl.errors import UserError
from perfedrl.experiments.config import Config
from perfedrl.federation.agent.local_computation import side_by_side, train
from perfedrl.federation.server.asynchronous_rounds import UploadArrival
from perfedrl.federation.server.run_state_machine import server_step
from perfedrl.simulation.compiled import measure_replicas
from perfedrl.simulation.simulator import Simulation


def replay(config: Config, arrivals: Iterable[Sequence[int]]) -> PyTree:
    """Return the message after all rounds of a config with these arrivals: on a CPU, the bits of the networked run.

    `arrivals` stand in the provenance of a finished run, under "federation". The simulated agents all work in every
    round from which an upload was recorded, and what was not recorded is dropped.
    """
    experiment = config.experiment
    algorithm, fleet = experiment.algorithm, experiment.fleet
    if not algorithm.asynchronous or not fleet.traceable:
        raise UserError("expected a run of asynchronous agents that JAX can trace; others cannot be replayed")
    arrived: dict[int, dict[int, int]] = {}
    for round_, agent, since in map(UploadArrival._make, arrivals):
        arrived.setdefault(round_, {})[agent] = since
    begun = {since for uploads in arrived.values() for since in uploads.values()}
    algorithms = jax.tree.map(lambda x: np.asarray([x], float), algorithm)
    chunk = None if side_by_side(algorithm.trajectories_per_round * (fleet.train.horizon + 1)) else 1
    server, clients = Simulation(experiment, config.seeds[:1]).start()
    seeds, server = np.asarray(config.seeds[:1], np.uint32), jax.tree.map(lambda x: x[0], server)
    uploads: dict[int, PyTree] = {}
    for k in range(config.rounds):
        if k in begun:
            message = jax.tree.map(lambda x: np.asarray(x)[None], server.message)
            moment = experiment.agent, fleet.train, np.uint32(0), np.uint32(k)
            made, _ = measure_replicas(algorithms, message, clients, seeds, *moment, how=train, chunk=chunk, devices=1)
            uploads[k] = jax.tree.map(lambda x: np.asarray(x)[0], made)
        now = stacked(arrived.get(k, {}), uploads, algorithm.unchanged_upload(server.message), fleet.agents)
        weights = None if experiment.weights is None else np.asarray(experiment.weights, np.float32)
        server = server_step(algorithm, server, now, weights)
    return jax.tree.map(np.asarray, server.message)


def stacked(arrived: dict[int, int], uploads: dict[int, PyTree], unchanged: PyTree, agents: int) -> PyTree:
    """The uploads of agents that arrive now, by the rounds in which they began; zeros for the others."""
    nothing = jax.tree.map(np.zeros_like, unchanged)

    def upload(agent: int) -> PyTree:
        return jax.tree.map(lambda x: x[agent], uploads[arrived[agent]]) if agent in arrived else nothing

    return jax.tree.map(lambda *xs: np.stack(xs), *map(upload, range(agents)))
