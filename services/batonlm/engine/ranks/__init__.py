"""One model computed by several ranks behind the one ModelRunner port.

In: step plans and payloads, at `runner.RankedRunner`. It sends them as messages over links (`link`)
to its ranks, processes of this machine (`processes`) or of several (`machines`, over `tcp`); tests
have threads in their place. Each is a `rank.Rank`: its part of the network (`shards`), its KV, and
what it exchanges with the others (`group`). Out: the tokens of the rank that draws them, and
payloads in `shared` memory.
"""
