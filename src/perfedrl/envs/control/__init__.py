"""Classic control with physics of every agent's own, equal to Gymnasium's step for step where physics are equal."""

from perfedrl.envs.control.cart_pole import CartPole, cart_pole
from perfedrl.envs.control.pendulum import Pendulum, pendulum

__all__ = ["CartPole", "Pendulum", "cart_pole", "pendulum"]
