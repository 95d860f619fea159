"""Which entry extends which, for policies that order single keys."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence


class Chains:
    """Parents and extensions of the entries of one policy.

    Most entries have at most one extension and a run comes in at once, so both maps are filled
    without a loop. What has lost its prefix is still known as its extension, should it come back.
    """

    __slots__ = ("extensions", "parents")

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes | None] = {}  # of every entry, where it is known
        # A dictionary for several, as an ordered set: which one comes first must not depend on how
        # this process hashes.
        self.extensions: dict[bytes, bytes | dict[bytes, None]] = {}

    def add(self, keys: Sequence[bytes], parent: bytes | None) -> None:
        """`keys`, at least one, came in, each the extension of the one before."""
        self.parents[keys[0]] = parent
        if parent is not None:
            self._extend(parent, keys[0])
        if len(keys) > 1:
            before, after = keys[:-1], keys[1:]
            self.parents.update(zip(after, before, strict=True))
            if self.extensions.keys().isdisjoint(before):
                self.extensions.update(zip(before, after, strict=True))
            else:
                for prefix, key in zip(before, after, strict=True):
                    self._extend(prefix, key)

    def _extend(self, prefix: bytes, key: bytes) -> None:
        found = self.extensions.get(prefix)
        if found is None:
            self.extensions[prefix] = key
        elif isinstance(found, dict):
            found[key] = None
        else:
            self.extensions[prefix] = {found: None, key: None}

    def forget(self, key: bytes) -> None:
        """`key` is gone."""
        parent = self.parents.pop(key)
        if parent is None:
            return
        found = self.extensions.pop(parent)
        if isinstance(found, dict):
            del found[key]
            if found:
                self.extensions[parent] = found

    def parent(self, key: bytes) -> bytes | None:
        """The key before one that is there, where it is known; it may be gone itself."""
        return self.parents[key]

    def end(self, key: bytes, held: Container[bytes]) -> bytes | None:
        """What has to go first where `key` is to go: the end of one of its extensions, or itself.

        None where each of them ends in a key that is held, or `key` is held.
        """
        extensions = self.extensions
        waiting = [key]
        while waiting:
            at = waiting.pop()
            if at in held:
                continue
            found = extensions.get(at)
            if found is None:
                return at
            if isinstance(found, dict):
                waiting.extend(found)
            else:
                waiting.append(found)
        return None

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.parents)

    def __contains__(self, key: object) -> bool:
        return key in self.parents

    def __len__(self) -> int:
        return len(self.parents)
