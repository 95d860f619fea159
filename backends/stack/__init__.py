"""The tier stack: the region's metadata, and what moves between the region and the tiers below.

`stack.TierStack` is the whole of it; `settings` can be had without anything else."""
