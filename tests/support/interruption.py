"""Interrupt a training from its progress callback."""


def stop_at(round_):
    """A progress callback that presses Ctrl-C after a round."""

    def progress(label, done, total):
        if done == round_:
            raise KeyboardInterrupt

    return progress
