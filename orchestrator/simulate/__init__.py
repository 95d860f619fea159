"""Replays a workload's metadata through eviction policies, without bytes and without processes."""
