"""The agent's side of a federation."""
