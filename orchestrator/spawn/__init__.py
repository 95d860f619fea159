"""Starts the workers of a plan, and sees that nothing outlives the run."""
