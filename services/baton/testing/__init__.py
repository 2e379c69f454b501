"""Stand-ins for workers and their parts, and what breaks them; no process that serves loads this.

In: options of one worker, or parameters of a test.
Out: scripted workers of every role, a runner without a model, hand-overs that go wrong, and a real
worker process with both.
"""
