"""Prometheus metrics of one replica.

snapshot    the numbers at one moment, made from what the report is made of
families    the metrics' names, and a snapshot as Prometheus has it
exporter    serves the last snapshot over HTTP
"""
