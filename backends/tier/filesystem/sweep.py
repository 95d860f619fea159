"""Remove what killed processes were writing, for whoever has ended them and opens no tier."""

from __future__ import annotations

import os
from collections.abc import Iterable

from backends.tier.filesystem import naming
from backends.tier.filesystem.io import OsIo
from backends.tier.filesystem.place import Place
from backends.tier.filesystem.writer import parse_writer, this_writer


def sweep(paths: Iterable[str]) -> int:
    """Remove unfinished files of dead writers of this machine; how many there were.

    What cannot be removed is left to the next tier that is opened there: it sweeps too, and gives
    back the space that the dead had reserved.
    """
    return sum(_sweep_path(path) for path in paths)


def _sweep_path(path: str) -> int:
    own = this_writer()
    try:
        found = [parse_writer(name) for name in os.listdir(os.path.join(path, naming.WRITERS))]
    except OSError:
        return 0
    dead = [writer for writer in found if writer and writer.alive(own.host) is False]
    if not dead:
        return 0
    place, removed = Place(path, own, OsIo(), flush_directories=False), 0
    try:
        place.open(make=False)
        try:
            removed += sum(place.empty_writer(writer) for writer in dead)
        finally:
            place.empty_writer(own)
    except OSError:
        pass
    finally:
        place.close()
    return removed
