"""A federation over a network: the agent's side of it, and the server's; importing the package imports nothing else."""
