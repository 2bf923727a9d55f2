"""Federated initializations for linear-quadratic regulators."""
