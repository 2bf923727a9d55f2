"""Claims of other mechanisms' papers, measured."""
