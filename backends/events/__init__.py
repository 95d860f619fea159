"""KV events: tell others which blocks are where, in the format that vLLM's engines publish.

    wire        the messages, byte for byte those of vLLM
    publisher   sends batches over ZeroMQ, keeps the last ones for who missed them
    source      turns what a tier stack does into batches

Nothing here is imported by the stack: it tells an observer, and `source.KvEvents` is one.
"""
