"""Makes weight updates: objectives, corrections, packing, optimiser and training backends."""
