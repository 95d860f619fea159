"""What the replicas of one node know of each other's region rows (`region.scope: node`).

`spec` and `layout` say where what stands in the shared index, `file` makes and opens it, `section`
is the part that a leader writes, `neighbours` what it reads of the others, `reader` how a worker
gets at their rows. See docs/adr/0014-node-scope.md.
"""
