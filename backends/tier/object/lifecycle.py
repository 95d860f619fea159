"""What bounds a bucket whose capacity is `unbounded`, in words for a plan."""

from __future__ import annotations

import json
from typing import Final

from backends.tier.object.settings import ObjectSettings

_DAYS: Final = 7


def lifecycle_rule(settings: ObjectSettings) -> list[str]:
    """Lines that say which rule to set, none where the tier keeps a capacity itself."""
    if settings.capacity_bytes is not None:
        return []
    if not settings.is_remote:
        return [f"{settings.url}: nothing bounds it; set capacity"]
    prefix = f"{settings.prefix}/" if settings.prefix else ""
    if settings.scheme == "s3":
        rule = {
            "Rules": [
                {
                    "ID": "kvquay",
                    "Status": "Enabled",
                    "Filter": {"Prefix": prefix},
                    "Expiration": {"Days": _DAYS},
                    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
                }
            ]
        }
        return [
            f"{settings.url}: nothing bounds it; set capacity, or this lifecycle rule:",
            f"aws s3api put-bucket-lifecycle-configuration --bucket {settings.bucket} "
            f"--lifecycle-configuration '{json.dumps(rule)}'",
        ]
    return [
        f"{settings.url}: nothing bounds it; set capacity, or a lifecycle rule that deletes what "
        f"begins with {prefix!r} after {_DAYS} days"
    ]
