"""The paged KV tensors of one worker: real memory, in the layout that was asked for."""

from __future__ import annotations

import torch

from backends.errors import ConfigError
from backends.layout import WorkerGroup

LAYOUTS = ("layers_first", "blocks_first")


class PagedKv:
    """One KV-cache group's blocks on one worker, zeroed.

    `layers_first`: one tensor a layer, [blocks, planes, tokens, heads, head_size].
    `blocks_first`: one tensor, [blocks, layers, planes, tokens, heads, head_size].
    """

    def __init__(
        self, group: WorkerGroup, blocks: int, dtype: torch.dtype, layout: str, device: torch.device
    ) -> None:
        if group.head_size * group.itemsize_bytes % 8:
            raise ConfigError(
                f"a head of {group.head_size} elements of {group.itemsize_bytes} bytes is not a "
                "multiple of 8 bytes; the reference engine verifies 8 bytes at a time"
            )
        block = (group.planes, group.tokens_per_block, len(group.heads), group.head_size)
        layers = len(group.layers)
        if layout == "blocks_first":
            self.tensors = [torch.zeros((blocks, layers, *block), dtype=dtype, device=device)]
            per_layer = list(self.tensors[0].unbind(1))
        else:
            self.tensors = [
                torch.zeros((blocks, *block), dtype=dtype, device=device) for _ in range(layers)
            ]
            per_layer = self.tensors
        # [blocks, planes, tokens, heads, words of 8 bytes]: what content is written and checked in
        self.words = [tensor.view(torch.int64) for tensor in per_layer]
