"""Unseen Gymnasium cart-poles and pendulums before and after one step."""
