"""Models and adapters as files: where they come from, and the folder in which a node keeps them.

In: the name of a model, which is a folder, a hub id, or a prefix of an object store. Out: a folder
on this machine whose every file was verified. `sources` reads and checks what others have,
`object_store` speaks the S3 protocol, `cache` keeps verified copies within a bound of bytes, and
`digest` is what two workers compare. Needs no torch.
"""
