from typing_extensions import Buffer

def write(
    directory: int,
    files: list[tuple[str, int, memoryview, int, int]],
    durability: str,
    bounce: memoryview | None,
    /,
) -> list[tuple[int, int]]:
    """For each (name, flags, data, atime, mtime in ns): open, seal the block in `data`, write all
    of it, set the times, flush as `durability` says (none, data, full), close.

    What failed first, as errno (0: nothing), and how many bytes were taken. The bytes go through
    `bounce`, whole pages, where it is given; as many files as it has room for are written at once.
    """

def read(
    directory: int,
    flags: int,
    files: list[tuple[str, memoryview, int, int]],
    summed: bool,
    bounce: memoryview | None,
    /,
) -> list[tuple[int, int, int, int, int, int, int, int, int, int]]:
    """For each (path, into, used_ns, before_ns): open beneath the directory without following
    links, look, and, if it is a regular file of `into`'s size, fill that; if it was last used
    before `before_ns`, say it was at `used_ns`. The bytes go through `bounce` where it is given.

    How far it came (0: to its end, 1: not opened, 2: not read), the errno of what failed, mode,
    size, device, inode, atime in ns, the bytes that were read, whether the payload's sum
    was made, and that, which is for who asks that it be `summed` and only of a whole block.
    """

def rename(names: list[tuple[int, str, int, str]], exclusive: bool, /) -> list[int]:
    """Rename each (directory, name, new directory, new name); an errno each, 0 for done.

    `exclusive`: EEXIST where the new name is taken.
    """

def stat(names: list[tuple[int, str]], /) -> list[tuple[int, int, int, int, int]]:
    """Look at each (directory, name), following no link.

    The errno (0: none) and mode, size, links, atime in ns.
    """

def sum(data: Buffer, portable: bool, /) -> int:
    """XXH3-64 of more than 240 bytes, as files are summed up, or as machines without AVX2 do it.

    For tests: it holds the interpreter.
    """

def use_ring(wanted: bool, /) -> bool:
    """Whether several writes are handed to the kernel at once; without, one after the other.

    For tests. It is wanted until the kernel refuses it.
    """
