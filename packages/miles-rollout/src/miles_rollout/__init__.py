"""Makes trajectories: engines and their router, session server, renderers, buffer, rewards and tasks."""
