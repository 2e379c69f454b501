"""A model in this process, without servers.

In: prompts, conversations or Requests, from any iterable. Out: an Answer for each, in order.
"""

from batonlm.llm.llm import LLM as LLM
