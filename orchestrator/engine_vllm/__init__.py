"""The engine is a real vLLM: one per replica, on our region and tiers by `backends.vllm`.

`settings` fills in what follows from `engine.model`, `command` writes vLLM's own arguments,
`export` prints them for people who start vLLM themselves, `spawner` and `replica` start and drive
it. Only `replica` imports vLLM, in a process of its own.
"""
