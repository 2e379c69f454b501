"""What the prefill and decode processes share: their parts, life, options, reports and self-test.

In: options, a scheduler's policy, a role's service.
Out: a process that serves; load and cache events for routers, metrics, an exit code.
"""
