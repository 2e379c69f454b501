"""Whether a request may start: keys, tenants, budgets, queues and limits.

In: a tenant, the size of its request, and the time. Out: a place in the queue, or a Refusal.
"""
