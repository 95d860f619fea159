"""The filesystem tier: one file for each block, shared by all replicas and processes.

The tier itself is in `tier`. It is not imported here, so that its settings can be checked without
numpy.
"""

from backends.tier.filesystem.settings import FilesystemSettings

__all__ = ["FilesystemSettings"]
