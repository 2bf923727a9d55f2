"""Simulations of small experiments."""

from perfedrl.simulation import Simulation
from perfedrl.simulation.experiment import Experiment


def simulation_of(fleet, policy, algorithms, seeds, agent=None, chunk=None, **parts):
    """The simulation of a fleet with one algorithm per seed; `parts` are those of an `Experiment`."""
    return Simulation(Experiment(fleet, policy, algorithms[0], agent, **parts), seeds, algorithms, chunk)
