"""Row numbers by key: what the tier stack asks before anything else."""

from backends.table.table import KeyTable, kinds, open_table

__all__ = ["KeyTable", "kinds", "open_table"]
