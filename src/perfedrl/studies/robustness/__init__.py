"""Hostile agents against robust aggregation, and the price of privacy."""
