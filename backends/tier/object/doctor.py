"""What `action=doctor` asks about an object store."""

from __future__ import annotations

import time
from dataclasses import dataclass

from backends.errors import TierError
from backends.tier.object.lifecycle import lifecycle_rule
from backends.tier.object.settings import ObjectSettings

__all__ = ["Leftover", "leftovers", "lifecycle_rule"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something unfinished. `age_s` is how long ago it was begun, or last written to."""

    name: str
    age_s: float
    what: str


def leftovers(settings: ObjectSettings) -> list[Leftover]:
    """Unfinished uploads below the url: they are paid for, and seen in no listing of objects.

    Those of writers that are at work now are among them. Raises TierError where they cannot be
    listed.
    """
    now_s = time.time()
    if settings.scheme == "s3":
        from backends.tier.object.uploads import list_uploads

        return [
            Leftover(upload.name, max(0.0, now_s - upload.began_s), "upload in parts")
            for upload in list_uploads(settings)
        ]
    if settings.scheme == "file":
        from backends.tier.object.leftovers import staged_files

        try:
            return [
                Leftover(path, max(0.0, now_s - found.st_mtime), "unfinished file")
                for path, found in staged_files(settings.prefix)
            ]
        except OSError as error:
            raise TierError(
                f"{settings.url} cannot be read: {error.strerror}; run it as the tier's user"
            ) from None
    if settings.scheme == "gs":
        raise TierError(
            f"{settings.url}: unfinished uploads are not listed here; a lifecycle rule with "
            "AbortIncompleteMultipartUpload removes them"
        )
    # Azure drops uncommitted parts after a week by itself, and memory has none.
    return []
