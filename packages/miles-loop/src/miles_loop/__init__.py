"""Composes a run: configuration, processes, driver, run folder, checkpoints and command line."""
