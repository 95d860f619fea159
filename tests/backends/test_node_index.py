"""The node's index: whose file it is and for how long, what a section says, who may believe it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.errors import RegionError
from backends.region.node import neighbours as neighbours_module
from backends.region.node.file import NodeFile
from backends.region.node.neighbours import CLAIM_S, LOOK_S, Neighbours
from backends.region.node.section import Section
from backends.region.node.spec import USES, WAYS, NodeIndexSpec
from backends.region.reap import find_stale, inspect, reap
from backends.region.region import Region
from tests.backends.node_kit import ROWS, index_spec, keys_of, new_run_id, region_spec
from tests.backends.region_kit import Kept, child, run_in_child


def join(spec: NodeIndexSpec, directory: Path, writable: bool = True) -> NodeFile:
    return NodeFile.join(spec, writable=writable, directory=str(directory))


@pytest.fixture
def shm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory of its own on the tmpfs of /dev/shm."""
    directory = Path("/dev/shm") / f"test_{new_run_id()}"
    directory.mkdir(mode=0o700)
    yield directory
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


class TestTheFile:
    def test_it_is_made_once_private_and_removed_by_the_last_to_leave(self, shm: Path) -> None:
        spec = index_spec(new_run_id())
        first = join(spec, shm)
        path = shm / spec.name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_size == spec.nbytes
        inode = path.stat().st_ino
        second = join(spec, shm)
        assert path.stat().st_ino == inode
        first.sections.versions[0, 3] = 7
        assert second.sections.versions[0, 3] == 7
        first.close()
        first.close()
        assert path.exists()
        second.close()
        assert not path.exists()

    def test_who_only_reads_cannot_write(self, shm: Path) -> None:
        reading = contextlib.closing(join(index_spec(new_run_id()), shm, writable=False))
        with reading as file, pytest.raises(ValueError, match="read-only"):
            file.sections.versions[0, 0] = 1

    def test_while_anybody_uses_it_nobody_reaps_it(self, shm: Path) -> None:
        spec = index_spec(new_run_id())
        with contextlib.closing(join(spec, shm)), contextlib.closing(join(spec, shm)):
            [found] = find_stale(str(shm))
            assert (found.lock, found.reapable, found.run_id) == ("held", False, spec.run_id)
            assert not reap([found], apply=True)[0].removed
            assert not found.stale

    def test_after_a_kill_of_all_it_is_stale_and_reaped(self, shm: Path) -> None:
        spec = index_spec(new_run_id())

        def use() -> Kept:
            return Kept((None, join(spec, shm)))

        with child(use) as one, child(use) as two:
            one.kill()
            assert inspect(str(shm / spec.name)).lock == "held"  # type: ignore[union-attr]
            two.kill()
        [found] = find_stale(str(shm))
        assert found.reapable
        assert reap([found], apply=True)[0].removed

    def test_who_comes_after_a_kill_of_all_uses_the_file_on(self, shm: Path) -> None:
        spec = index_spec(new_run_id())
        with child(lambda: Kept((None, join(spec, shm)))) as one:
            one.kill()
        with contextlib.closing(join(spec, shm)) as file:
            assert not file.owned(0)
        assert not list(shm.iterdir())

    @pytest.mark.parametrize("change", ["rows", "fingerprint", "replicas"])
    def test_another_plans_index_is_refused(self, change: str, shm: Path) -> None:
        spec = index_spec(new_run_id())
        other = {
            "rows": NodeIndexSpec(spec.run_id, 0, 2, ROWS + 1, spec.fingerprint),
            "fingerprint": NodeIndexSpec(spec.run_id, 0, 2, ROWS, "ab" * 32),
            "replicas": NodeIndexSpec(spec.run_id, 0, 3, ROWS, spec.fingerprint),
        }[change]
        with (
            contextlib.closing(join(spec, shm)),
            pytest.raises(RegionError, match="not the expected one"),
        ):
            join(other, shm)

    @pytest.mark.parametrize("what", ["link", "directory", "garbage"])
    def test_what_is_no_index_is_refused_and_left_alone(self, what: str, shm: Path) -> None:
        spec = index_spec(new_run_id())
        path, target = shm / spec.name, shm / "target"
        if what == "link":
            target.write_bytes(b"x" * spec.nbytes)
            path.symlink_to(target)
        elif what == "garbage":
            path.write_bytes(b"x" * spec.nbytes)
        else:
            path.mkdir()
        try:
            with pytest.raises(RegionError):
                join(spec, shm)
            assert os.path.lexists(path)
        finally:
            if what == "directory":
                path.rmdir()

    def test_two_that_come_at_once_use_the_same_file(self, shm: Path) -> None:
        spec = index_spec(new_run_id())

        def use() -> Kept:
            file = join(spec, shm)
            return Kept((os.fstat(file._fd).st_ino, file))  # type: ignore[arg-type]

        with contextlib.ExitStack() as stack:
            inodes = {stack.enter_context(child(use)).result for _ in range(4)}
            assert inodes == {(shm / spec.name).stat().st_ino}


class TestOwnership:
    def test_a_section_is_owned_until_its_process_is_killed(self, shm: Path) -> None:
        spec = index_spec(new_run_id())

        def own() -> Kept:
            file = join(spec, shm)
            file.own(1)
            return Kept((None, file))

        with contextlib.closing(join(spec, shm)) as file, child(own) as owner:
            assert (file.owned(0), file.owned(1)) == (False, True)
            with pytest.raises(RegionError, match="another engine's"):
                file.own(1)
            file.own(0)
            owner.kill()
            assert not file.owned(1)
            file.own(1)

    def test_closing_gives_the_section_up(self, shm: Path) -> None:
        spec = index_spec(new_run_id())
        with contextlib.closing(join(spec, shm)) as file:
            other = join(spec, shm)
            other.own(1)
            assert file.owned(1)
            other.close()
            assert not file.owned(1)

    def test_an_error_tells_that_it_is_closed(self, shm: Path) -> None:
        file = join(index_spec(new_run_id()), shm)
        file.close()
        with pytest.raises(RegionError, match="closed"):
            file.owned(0)


class Pair:
    """Two leaders' sections of one index, and what the second sees of the first."""

    def __init__(self, shm: Path, rows: int = ROWS) -> None:
        self.spec = index_spec(new_run_id(), rows=rows)
        self._close = contextlib.ExitStack()
        files = [self._close.enter_context(contextlib.closing(join(self.spec, shm))) for _ in "ab"]
        self.sections = [Section(file, n) for n, file in enumerate(files)]
        for n, section in enumerate(self.sections):
            region = Region.create(region_spec(self.spec.run_id, n))
            self._close.callback(region.close)
            section.open(region.handle())
        self.files = files
        self.views = [Neighbours(file, own) for file, own in zip(files, self.sections, strict=True)]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def found(self, keys: list[bytes], group: int = 0) -> list[int | None]:
        places = self.views[1].find(keys, group)
        assert all(place is None or place.replica == 0 for place in places)
        return [None if place is None else place.row for place in places]


class TestSections:
    def test_what_is_published_is_found_in_its_group_until_it_is_withdrawn(self, shm: Path) -> None:
        with Pair(shm) as pair:
            keys = keys_of("a", 3)
            pair.sections[0].publish(keys[:2], 0, [5, 2])
            pair.sections[0].publish(keys[:1], 1, [7])
            assert pair.found(keys) == [5, 2, None]
            assert pair.found(keys, group=1) == [7, None, None]
            assert pair.views[0].find(keys, 0) == [None] * 3  # its own are no neighbour's
            pair.sections[0].withdraw(keys[:1], 0)
            assert pair.found(keys) == [None, 2, None]
            assert pair.found(keys, group=1) == [7, None, None]

    def test_a_version_is_odd_while_the_row_may_be_read_and_never_comes_again(
        self, shm: Path
    ) -> None:
        with Pair(shm) as pair:
            section, [key, other] = pair.sections[0], keys_of("a", 2)
            seen = [section.version(3)]
            for name in (key, other, key):
                section.publish([name], 0, [3])
                seen.append(section.version(3))
                assert seen[-1] % 2 == 1
                section.withdraw([name], 0)
                seen.append(section.version(3))
                assert seen[-1] % 2 == 0
            assert seen == sorted(set(seen))

    def test_a_row_that_is_published_anew_is_not_found_under_its_old_name(self, shm: Path) -> None:
        with Pair(shm) as pair:
            old, new = keys_of("a", 2)
            pair.sections[0].publish([old], 0, [1])
            before = pair.sections[0].version(1)
            pair.sections[0].publish([new], 0, [1])
            assert pair.found([old, new]) == [None, 1]
            assert pair.sections[0].version(1) > before
            assert pair.sections[0].shared == 1

    def test_a_section_taken_over_has_nothing_of_its_old_owner(self, shm: Path) -> None:
        spec = index_spec(new_run_id())

        def publish() -> Kept:
            file = join(spec, shm)
            section = Section(file, 0)
            region = Region.create(region_spec(spec.run_id, 0))
            section.open(region.handle())
            section.publish(keys_of("a", 2), 0, [0, 1])
            return Kept((section.version(0), file, region))

        with child(publish) as owner, contextlib.closing(join(spec, shm)) as file:
            views = Neighbours(file, Section(file, 1))
            assert all(views.find(keys_of("a", 2), 0))
            owner.kill()
            new = join(spec, shm)
            section = Section(new, 0)
            assert section.version(0) > owner.result
            assert section.version(0) % 2 == 0
            with contextlib.closing(Region.create(region_spec(spec.run_id, 0))) as region:
                section.open(region.handle())
                time.sleep(2 * LOOK_S)
                assert views.find(keys_of("a", 2), 0) == [None, None]
            new.close()

    def test_a_killed_leaders_blocks_are_nobodys(self, shm: Path) -> None:
        spec = index_spec(new_run_id())

        def publish() -> Kept:
            file = join(spec, shm)
            section = Section(file, 0)
            region = Region.create(region_spec(spec.run_id, 0))
            section.open(region.handle())
            section.publish(keys_of("a", 2), 0, [0, 1])
            return Kept((None, file, region))

        with child(publish) as owner, contextlib.closing(join(spec, shm)) as file:
            views = Neighbours(file, Section(file, 1))
            assert all(views.find(keys_of("a", 2), 0))
            owner.kill()
            time.sleep(2 * LOOK_S)
            assert views.find(keys_of("a", 2), 0) == [None, None]
            assert views.taken(keys_of("a", 2), 0) == [False, False]
            assert views.lost == 1

    def test_closing_a_section_hides_it_and_is_no_death(self, shm: Path) -> None:
        with Pair(shm) as pair:
            pair.sections[0].publish(keys_of("a", 1), 0, [0])
            assert pair.found(keys_of("a", 1)) == [0]
            pair.sections[0].close()
            time.sleep(2 * LOOK_S)
            assert pair.found(keys_of("a", 1)) == [None]
            assert pair.views[1].lost == 0

    def test_one_that_is_avoided_is_not_asked_for_a_while(self, shm: Path) -> None:
        with Pair(shm) as pair:
            pair.sections[0].publish(keys_of("a", 1), 0, [0])
            pair.found(keys_of("a", 1))
            pair.views[1].avoid(0, 0.1)
            assert pair.found(keys_of("a", 1)) == [None]
            time.sleep(0.1 + 2 * LOOK_S)
            assert pair.found(keys_of("a", 1)) == [0]

    @settings(max_examples=15)
    @given(st.data())
    def test_the_table_is_the_dictionary_that_it_stands_for(self, data: st.DataObject) -> None:
        directory = Path("/dev/shm") / f"test_{new_run_id()}"
        directory.mkdir(mode=0o700)
        try:
            with Pair(directory) as pair:
                section, names = pair.sections[0], keys_of("a", 2 * ROWS)
                model: dict[tuple[bytes, int], int] = {}
                for _ in range(data.draw(st.integers(1, 25))):
                    some = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=ROWS))
                    group = data.draw(st.integers(0, 1))
                    act = data.draw(st.sampled_from(["publish", "withdraw", "claim"]))
                    if act == "publish":
                        rows = data.draw(st.permutations(range(ROWS)))[: len(some)]
                        model = {block: r for block, r in model.items() if r not in rows}
                        section.publish(some, group, rows)
                        model |= {(key, group): r for key, r in zip(some, rows, strict=True)}
                    elif act == "withdraw":
                        section.withdraw(some, group)
                        for key in some:
                            model.pop((key, group), None)
                    else:
                        absent = [key for key in some if (key, group) not in model]
                        section.claim(absent, group, time.monotonic_ns())
                    for asked in (0, 1):
                        found = pair.found(names, asked)
                        expected = [model.get((key, asked)) for key in names]
                        # A bucket that is full leaves a block out; nothing else may.
                        assert all(f in (e, None) for f, e in zip(found, expected, strict=True))
                        if len(section._slot) <= WAYS:
                            assert found == expected
                    readable = {row for row in range(ROWS) if section.version(row) % 2}
                    assert readable == set(model.values()) == set(section.block_of)
        finally:
            directory.rmdir()


class TestClaims:
    def test_the_earlier_claim_counts_and_one_that_is_too_old_does_not(
        self, shm: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Pair(shm) as pair:
            keys = keys_of("a", 3)
            now_ns = time.monotonic_ns()
            pair.sections[0].claim(keys[:1], 0, now_ns)
            pair.sections[0].claim(keys[1:2], 0, now_ns + 1000)
            pair.sections[0].claim(keys[2:], 0, now_ns - int(CLAIM_S * 1e9))
            view = pair.views[1]
            assert view.find(keys, 0) == [None] * 3  # nothing to be read yet
            assert view.taken(keys, 0) == [True, True, False]
            assert view.taken(keys, 0, since_ns=now_ns + 500) == [True, False, False]

    def test_of_two_at_the_same_time_the_lower_number_goes_first(self, shm: Path) -> None:
        with Pair(shm) as pair:
            keys, now_ns = keys_of("a", 1), time.monotonic_ns()
            for section in pair.sections:
                section.claim(keys, 0, now_ns)
            assert pair.views[1].taken(keys, 0, since_ns=now_ns) == [True]
            assert pair.views[0].taken(keys, 0, since_ns=now_ns) == [False]

    def test_a_block_that_is_there_counts_whatever_its_time(self, shm: Path) -> None:
        with Pair(shm) as pair:
            keys = keys_of("a", 1)
            pair.sections[0].publish(keys, 0, [0])
            assert pair.views[1].taken(keys, 0, since_ns=1) == [True]


class TestUses:
    def test_an_owner_learns_which_rows_others_used_in_runs(self, shm: Path) -> None:
        with Pair(shm) as pair:
            owner, user = pair.sections
            owner.publish(keys_of("a", 4), 0, [0, 1, 2, 3])
            place = [p for p in pair.views[1].find(keys_of("a", 4), 0) if p is not None]
            pair.views[0].look()
            user.use((*p, n in (0, 2)) for n, p in enumerate(place))
            assert pair.views[0].uses() == [[0, 1], [2, 3]]
            assert pair.views[0].uses() == []

    def test_uses_of_what_has_gone_are_passed_over(self, shm: Path) -> None:
        with Pair(shm) as pair:
            owner, user = pair.sections
            owner.publish(keys_of("a", 2), 0, [0, 1])
            places = [p for p in pair.views[1].find(keys_of("a", 2), 0) if p is not None]
            pair.views[0].look()
            user.use((*p, n == 0) for n, p in enumerate(places))
            owner.publish(keys_of("b", 1), 0, [0])
            assert pair.views[0].uses() == [[1]]

    def test_more_uses_than_the_ring_holds_lose_the_oldest(self, shm: Path) -> None:
        with Pair(shm) as pair:
            owner, user = pair.sections
            owner.publish(keys_of("a", 2), 0, [0, 1])
            first, last = (p for p in pair.views[1].find(keys_of("a", 2), 0) if p is not None)
            pair.views[0].look()
            for _ in range(USES):
                user.use([(*first, True)])
            user.use([(*last, True)])
            seen = pair.views[0].uses()
            assert len(seen) == USES
            assert seen[-1] == [1]


def test_looking_up_a_batch_asks_who_lives_no_more_often_than_needed(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pair(shm) as pair:
        asked = []
        owned = NodeFile.owned
        monkeypatch.setattr(NodeFile, "owned", lambda *a: asked.append(a) or owned(*a))
        monkeypatch.setattr(neighbours_module, "LOOK_S", 60.0)
        for _ in range(50):
            pair.found(keys_of("a", 3))
        assert len(asked) == 1


def test_the_index_has_room_for_every_row_of_a_region() -> None:
    for rows in (1, 7, 8, 1000, 20_480):
        spec = index_spec("r", rows=rows)
        assert spec.buckets * WAYS >= 2 * rows
        assert spec.section_bytes <= 264 * rows + 16 * USES + 512
        assert spec.nbytes == spec.file_spec.nbytes


def test_a_child_of_the_owner_does_not_leave_for_it(shm: Path) -> None:
    spec = index_spec(new_run_id())
    with contextlib.closing(join(spec, shm)) as file:
        file.own(0)
        with contextlib.closing(join(spec, shm)) as other:
            run_in_child(file.close)
            assert other.owned(0)
            assert (shm / spec.name).exists()


def test_who_only_looks_does_not_make_the_last_one_leave_the_file_behind(shm: Path) -> None:
    """Whoever lists or reaps files holds the lock of each for a moment."""
    spec = index_spec(new_run_id())
    last = join(spec, shm)
    last.own(0)
    looking = os.open(shm / spec.name, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    looked = threading.Timer(0.05, os.close, [looking])
    looked.start()
    last.close()
    looked.join()
    assert not (shm / spec.name).exists()


def test_a_leader_that_lives_takes_the_file_away_itself(shm: Path) -> None:
    spec = index_spec(new_run_id())
    first, last = join(spec, shm), join(spec, shm)
    first.own(0)
    last.own(1)
    first.close()
    assert (shm / spec.name).exists()
    last.close()
    assert not (shm / spec.name).exists()
