"""What the bytes of a block are: a pure function of (key, layer, KV head, token, element).

All coordinates are global, so a rank can make its slice alone, and a block that landed in the wrong
slot, layer, head, token or place has other bytes. Every 8 bytes are a 64-bit word

    word = place(layer, plane, head, token, word) ^ mix(block hash ^ stream(group, layer, head))

where `place` comes from a counter-based generator and `mix` is the finaliser of SplitMix64 (Steele,
Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014). Two words at different
places agree by chance once in 2^64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from backends.layout import WorkerGroup

UInt64Array = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(values: UInt64Array) -> UInt64Array:
    """SplitMix64's finaliser, element by element, modulo 2^64."""
    with np.errstate(over="ignore"):
        mixed = values + _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)


def _coordinate(*parts: npt.ArrayLike) -> UInt64Array:
    """A 64-bit name for a place, from its coordinates; arrays broadcast."""
    name = np.zeros((), dtype=np.uint64)
    for part in parts:
        name = mix64(name ^ np.asarray(part, dtype=np.uint64))
    return name


class BlockContent:
    """Expected words of one KV-cache group's blocks, as one worker holds them."""

    def __init__(self, group: WorkerGroup, tokens: npt.ArrayLike, device: torch.device) -> None:
        """`tokens` are this worker's token positions in a logical block, [tokens_per_block]."""
        words = group.head_size * group.itemsize_bytes // 8
        layers = np.asarray(group.layers, dtype=np.uint64)[:, None, None]
        planes = np.arange(group.planes, dtype=np.uint64)[:, None]
        heads = np.asarray(list(group.heads), dtype=np.uint64)
        self._streams = _coordinate(group.group_index, layers, planes, heads)
        place = _coordinate(
            self._streams[:, :, None, :, None],
            np.asarray(tokens, dtype=np.uint64)[:, None, None],
            np.arange(words, dtype=np.uint64),
        )
        # [layers, planes, tokens, heads, words]
        self._place = torch.from_numpy(place.view(np.int64)).to(device)
        self._device = device

    def words(self, layer: int, hashes: npt.NDArray[np.int64]) -> torch.Tensor:
        """int64 [n, planes, tokens, heads, words]: layer number `layer` (local) of n blocks."""
        keys = mix64(hashes.view(np.uint64)[:, None, None] ^ self._streams[layer])
        keyed = torch.from_numpy(keys.view(np.int64)).to(self._device)
        return self._place[layer] ^ keyed[:, :, None, :, None]
