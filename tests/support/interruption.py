"""Observers of training: one that presses Ctrl-C, and one that notes the rounds it is told of."""

from perfedrl.simulation.observers import Observer


class StopAt(Observer):
    """Presses Ctrl-C after a round."""

    def __init__(self, round_):
        self.round = round_

    def on_round(self, state):
        if state.round == self.round:
            raise KeyboardInterrupt


class Rounds(Observer):
    """Notes the round at which training starts, and those at which it pauses."""

    def __init__(self):
        self.seen = []

    def on_start(self, state):
        self.seen.append(state.round)

    def on_round(self, state):
        self.seen.append(state.round)
