"""Moves weights: canonical names, buckets, transports and the update transaction."""
