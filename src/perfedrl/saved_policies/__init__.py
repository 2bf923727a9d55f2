"""Policies in files, which decide in NumPy: nothing here imports JAX, so that a robot need not have it."""
