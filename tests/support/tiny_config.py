"""Configs that train in a moment, and changed copies of them."""

BASE = {
    "name": "tiny",
    "seeds": 2,
    "rounds": 3,
    "fleet": {"env": "gridworld", "width": 2, "horizon": 3},
    "policy": {"name": "table"},
    "algorithm": {"name": "per-fedavg-pg", "alpha": 1.0, "beta": 0.1, "m_in": 2, "m_h": 2, "m_out": 2},
}

FEDAVG = {
    **BASE,
    "rounds": 2,
    "fleet": {"env": "gridworld", "width": 3, "horizon": 5},
    "algorithm": {"name": "fedavg-pg", "alpha": 1.0, "beta": 0.2},
}
"""Federated averaging on a grid of 3 x 3 cells."""


def changed(**changes) -> dict:
    """The base config with some tables updated and some keys replaced."""
    return {**BASE, **{k: {**BASE[k], **v} if isinstance(v, dict) and k in BASE else v for k, v in changes.items()}}


def word():
    """A function that makes no part of an experiment."""
    return "word"
