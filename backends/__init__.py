"""Places and copies KV blocks: regions, copies, tiers.

A library on its own: it imports neither Hydra nor `orchestrator`, so that our reference engine
and a real inference engine can both drive it.
"""
