"""How processes outside a replica's group find its region: through a file of its creator."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from backends.errors import RegionError
from backends.region.share import find_region, share_region
from backends.region.spec import RegionSpec

SPEC = RegionSpec("share_dp0", "share", "memfd", 4, 4096, 1, "ab" * 32)


def test_who_is_not_in_the_group_finds_the_region_while_its_creator_lives(tmp_path: Path) -> None:
    path = tmp_path / "replicas" / "dp0" / "region.json"
    with share_region(lambda told: [told], "host", 0, SPEC, path) as region:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert os.listdir(path.parent) == [path.name]
        region.slot_view(0)[:] = 7
        with find_region(SPEC, path) as found:
            assert (found.slot_view(0) == 7).all()
    with pytest.raises(RegionError):
        find_region(SPEC, path)


def test_a_link_or_a_damaged_file_in_its_place_is_refused(tmp_path: Path) -> None:
    path, link = tmp_path / "region.json", tmp_path / "link.json"
    path.write_text("{")
    link.symlink_to(path)
    for place in (path, link, tmp_path / "missing.json"):
        with pytest.raises(RegionError, match="cannot be found"):
            find_region(SPEC, place)


def test_each_host_has_a_region_of_its_own() -> None:
    """As two nodes would: each group member is told what all have told."""
    with (
        share_region(lambda told: [told, other(told)], "a", 0, SPEC) as first,
        share_region(lambda told: [other(told), told], "b", 0, SPEC) as second,
    ):
        first.slot_view(0)[:] = 1
        assert not second.slot_view(0).any()


def other(told: object) -> object:
    """What the first worker of another host tells in the same exchange."""
    return {**told, "host": "elsewhere"} if isinstance(told, dict) else told
