"""Connections between the processes of a fleet: frames that arrive once and in order, through resets of the network."""
