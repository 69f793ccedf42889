"""A recipe for tests, and processes without a model that stand in for engine and trainer."""
