"""The code in a page of the documentation, so that tests run what readers copy."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"# ([a-z_]+\.py)\n")


def code_blocks(page: str) -> list[str]:
    return _BLOCK.findall((DOCS / page).read_text())


def write_files(page: str, directory: Path) -> list[Path]:
    """Write each code block whose first line is a comment with a file's name to that file."""
    written = []
    for block in code_blocks(page):
        name = _NAME.match(block)
        if name:
            path = directory / name[1]
            path.write_text(block)
            written.append(path)
    return written
