"""The object tier: one object for each block, shared by all replicas, processes and machines.

    settings.ObjectSettings          what a configuration says, frozen; holds no credentials
    tier.ObjectTier(context, settings, *, client=None)
                                     the tier; TierError where the store cannot be used at all
    tier.ObjectTier.describe()       lines for people: conditional writes or not, why it is out
    tier.ObjectTier.counters()       besides those of every tier: requests, retries, throttled,
                                     timeouts, denied, breaker_opened, dedup_skips, probes, ...
    doctor.leftovers(settings)       unfinished uploads under the url, for `action=doctor`
    doctor.ObjectBench(settings, owner)
                                     objects to measure a store with, which go again
    lifecycle.lifecycle_rule(settings)
                                     what rule an unbounded bucket should have, for a plan

The tier itself is not imported here, so that its settings can be checked without numpy.
"""

from backends.tier.object.settings import ObjectSettings

__all__ = ["ObjectSettings"]
