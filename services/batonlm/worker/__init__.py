"""What the prefill and decode processes share: parts, lifecycle, options, reports and self-test.

The package takes options, a scheduler's policy and a role's service, and runs a process that
serves. It reports load and cache events to routers, and metrics, and returns an exit code.
"""
