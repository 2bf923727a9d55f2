"""Agents that balance Gymnasium's cart-poles, each with a pole of its own; the fourth does not train."""

LENGTHS = (0.1, 0.3, 0.6, 1.0)
MODULE = '''"""A cart-pole in a module of the user's own."""

from gymnasium.envs.classic_control import CartPoleEnv


class Pole(CartPoleEnv):
    """A cart-pole that takes the length of its pole."""

    def __init__(self, length=0.5, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.length, self.polemass_length = length, length * self.masspole
'''
EPISODES = {"horizon": 39, "parallel": 4}


def table(rounds, **fleet):
    """A config that trains three of them, in a module that only agents have."""
    lengths = {"train": list(LENGTHS[:3]), "held_out": list(LENGTHS[3:])}
    world = {"env": "gymnasium", "id": "my_poles:Pole", "agents": 3, "held_out": 1, "vary": {"length": lengths}}
    steps = {"alpha": 0.05, "beta": 0.05, "local_steps": 2, "m_in": 4, "m_out": 4, "variant": "first-order"}
    return {
        "name": "poles",
        "seeds": [3],
        "rounds": rounds,
        "evaluate_every": rounds,
        "fleet": {**world, **EPISODES, **fleet},
        "policy": {"name": "mlp", "hidden": [4]},
        "algorithm": {"name": "per-fedavg-pg", **steps},
        "evaluation": {"name": "monte-carlo", "trajectories": 4, "episodes": 4},
    }


def agent_table(i, **fleet):
    """The settings of one of them."""
    own = {"env": "gymnasium", "id": "my_poles:Pole", "agents": 1, "options": {"length": LENGTHS[i]}}
    return {"fleet": {**own, **EPISODES, **fleet}}
