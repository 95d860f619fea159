"""The filesystem tier: one file for each block, shared by all replicas and processes."""

from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.filesystem.tier import FilesystemTier

__all__ = ["FilesystemSettings", "FilesystemTier"]
