"""Whether a request may start: keys, tenants, budgets, queues and limits.

In: who asks, for how much, and the time.
Out: a place in the queue, or a Refusal.
"""
