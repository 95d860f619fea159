"""One shared mapping per replica and node, in which every local worker has its slot of each row.

Modules: `spec` (layout), `header` (page 0), `region` (create, attach, views), `handle` (how peers
find it), `memfile` and `shmfile` (the two backings), `reserve` and `space` (room, checked before
anything maps), `reap` (files of dead owners), `prefault`, `hugepages`, `numa`, `pin`.

This package imports nothing when it is loaded: planning needs `spec`, `space` and `reap`, which
load neither numpy nor torch.
"""
