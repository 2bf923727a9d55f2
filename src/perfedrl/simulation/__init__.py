"""The fleet in one process: training loops, measurements and their history."""

from perfedrl.simulation.simulator import Result, Simulation, simulate

__all__ = ["Result", "Simulation", "simulate"]
