"""What an engine computes next: sequences, plans and the two schedulers.

In: attempts, results of steps.
Out: a StepPlan for the runner, events for the service.
"""
