"""Composes, checks, plans, launches, drives and reports a KV-cache offload deployment."""

__version__ = "0.1.0"
