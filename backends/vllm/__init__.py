"""A thin adapter, through which vLLM's OffloadingConnector runs on our region, tiers and stack.

`spec.KvquayOffloadingSpec` is what vLLM loads by `spec_name` and `spec_module_path`; the classes
of `tiers` it loads as secondary tiers of its own TieringOffloadingSpec. All of it needs a vLLM that
`interface` knows, and nothing else of kvquay imports this package.
"""
