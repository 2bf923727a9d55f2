"""The paper's neural experiments: E4, E5 and E7."""
