"""The formats in which models write reasoning and tool calls: how to read and how to enforce them.

In: the text of an answer, piece by piece, and the tools of its request. Out: content, reasoning
and calls, and grammars that match nothing but calls. `families` has the tables, `calls` the engine,
`bodies` the ways to write a name with its arguments.
"""
