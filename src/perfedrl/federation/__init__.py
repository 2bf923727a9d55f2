"""Federated training over a network: agents (`agent`), a server (`server`) and NVFlare between them (`engine`)."""
