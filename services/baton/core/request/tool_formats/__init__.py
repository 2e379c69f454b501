"""The ways in which models write calls of tools, one a file: how to read and how to force them."""
