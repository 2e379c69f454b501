"""The prefill process: computes prompts, and keeps their KV until a decode worker has it.

It takes attempts from routers and returns token 0 of every choice. Decode workers fetch the KV
chunk by chunk, while the next chunk is computed.
"""
