"""2-D navigation of the meta-RL literature."""
