"""The server of a federation: the state machine of a run, its folder on disk, its presenter, and checks of uploads."""
