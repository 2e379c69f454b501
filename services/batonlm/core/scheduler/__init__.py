"""What an engine computes next: sequences, plans and one scheduler for both roles.

In: attempts, a policy, results of steps.
Out: a StepPlan for the runner, events for the service.
"""
