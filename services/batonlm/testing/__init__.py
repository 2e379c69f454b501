"""Stand-ins for workers and their parts, and fault injection. No serving process imports this.

In: options of one worker, or parameters of a test.
Out: scripted workers of every role, a runner without a model, faulty KV hand-overs, and a real
worker process that uses both.
"""
