"""The prefill process: computes prompts, and keeps their KV until a decode worker has it.

In: attempts of routers.
Out: token 0 of every choice; KV for decode workers, chunk by chunk while the next one computes.
"""
