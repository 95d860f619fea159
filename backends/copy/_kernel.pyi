import numpy as np
from numpy.typing import NDArray

def kernels() -> tuple[str, ...]:
    """Names of the kernels this processor can run, best first."""

def copy(
    kernel: str,
    threads: int,
    to_slot: bool,
    fragments: NDArray[np.int64],
    block_ids: NDArray[np.int64],
    rows: NDArray[np.int64],
    blocks_per_chunk: int,
    slot_address: int,
    row_stride_bytes: int,
    slot_bytes: int,
    block_bytes: int,
    /,
) -> None:
    """Moves one batch with the GIL released. Trusts every address, id and row.

    `fragments` is C-contiguous [F, 4]: address, block stride, bytes, and offset in the block's
    place in the slot. `block_ids` is [chunks, blocks_per_chunk], `rows` [chunks]. Exactly
    `threads` threads work, the calling one among them.
    """
