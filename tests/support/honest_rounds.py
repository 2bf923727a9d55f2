"""Rounds of honest agents in one process, with the upload of each."""

import jax
import numpy as np

from perfedrl.algorithms import ServerState
from perfedrl.experiments.files import named_leaves
from perfedrl.simulation.keys import agent_keys


def honest_rounds(config, rounds):
    """The message of each round and the uploads of all agents of the simulated fleet."""
    experiment = config.experiment
    algorithm, tasks = experiment.algorithm, experiment.fleet.train
    server, first = algorithm.init(experiment.policy.init(jax.random.key(0)))
    clients = jax.tree.map(lambda x: np.stack([x] * experiment.fleet.agents), first)

    def client(message, state, task, key):
        return algorithm.client(message, state, experiment.agent(task), key)

    each = jax.jit(jax.vmap(client, (None, 0, 0, 0)))
    for k in range(rounds):
        keys = jax.vmap(lambda key, k=k: jax.random.fold_in(key, k))(agent_keys(0, tasks))
        uploads, clients = each(server.message, clients, tasks, keys)
        own = [jax.tree.map(lambda x, i=i: np.asarray(x[i]), uploads) for i in range(experiment.fleet.agents)]
        yield named_leaves(server.message), [named_leaves(upload) for upload in own]
        server = algorithm.server(ServerState(*server), uploads, np.ones(experiment.fleet.agents, np.float32))
