"""What writers that died have left unfinished in an object store, where no listing shows it."""

from __future__ import annotations

from typing import Final

from backends.errors import TierError
from backends.tier.object.doctor import abort_rule, leftovers
from backends.tier.object.settings import ObjectSettings
from orchestrator.doctor.notes import Notes

OLD_S: Final = 3600.0
"""Nobody takes so long over an upload."""


def check_leftovers(settings: ObjectSettings, notes: Notes) -> None:
    """Uploads that nobody will finish: the check `object.leftovers`."""
    notes.doing("listing unfinished uploads")
    name = "object.leftovers"
    try:
        found = leftovers(settings)
    except TierError as error:
        limit, _, fix = str(error).removeprefix(f"{settings.url}: ").partition("; ")
        expected = "a list, or a lifecycle rule that removes them"
        notes.warn(name, limit, expected, fix or "give the key the right to list them")
        return
    old = [each for each in found if each.age_s > OLD_S]
    if old:
        hours = max(each.age_s for each in old) / 3600
        count = "1 unfinished upload is" if len(old) == 1 else f"{len(old)} unfinished uploads are"
        notes.warn(
            name,
            f"{count} older than an hour, the oldest {hours:.0f} h",
            "none: they are paid for, and are in no listing of objects",
            abort_rule(settings) or "they are swept when a tier is opened there",
        )
    else:
        notes.ok(name, f"{len(found)} uploads under way, none of them old" if found else "none")
