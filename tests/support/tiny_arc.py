"""The smallest config of the arc that trains, for tests of what happens to runs."""

TINY_ARC = {
    "name": "tiny-arc",
    "seeds": 1,
    "rounds": 1,
    "fleet": {"env": "arc", "goals": 2, "held_out": 1, "horizon": 3},
    "policy": {"name": "mlp", "hidden": [4]},
    "algorithm": {"name": "fedavg-pg", "alpha": 0.5, "beta": 0.2, "local_steps": 1, "m": 2},
    "evaluation": {"name": "monte-carlo", "trajectories": 2, "episodes": 2},
}
