"""Experiments: configs, runs on disk, statistics over seeds, and the paper's claims."""
