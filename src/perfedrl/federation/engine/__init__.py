"""The network engine, NVFlare: only modules in this folder import it."""
