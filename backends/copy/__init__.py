"""Moves KV blocks between a worker's paged KV tensors and its slot of a shared-memory region.

Not for placing blocks: which block goes to which row is decided elsewhere.
"""

from __future__ import annotations

from backends.copy.copier import GroupCopier
from backends.copy.handle import CopyHandle, CopyStats
from backends.copy.kernels import available_kernels

__all__ = ["CopyHandle", "CopyStats", "GroupCopier", "available_kernels"]
