"""The hand-over of KV between two workers: its states, its messages, who fits whom.

In: messages and completions.
Out: the next state and what to send.
"""
