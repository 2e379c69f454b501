"""The OpenAI HTTP API: bytes in, core Requests to the Frontend, its events out as JSON or SSE."""
