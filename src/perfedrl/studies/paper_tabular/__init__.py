"""The paper's tabular experiments: E1, E3 and E6."""
