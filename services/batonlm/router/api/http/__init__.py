"""The OpenAI HTTP API, and in `anthropic` and `ollama` the forms of two others.

In: bytes of clients, over HTTP/1.1 and HTTP/2.
Out: core Requests for the Pipeline; its events as one JSON document or as server-sent events.
A request passes `server`, `access`, `body`, `parse`, `generation` and `answers`, in this order.
"""
