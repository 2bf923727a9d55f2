"""Experiments: configs, training, runs on disk, evaluation of runs, and statistics over seeds."""
