from batonlm.llm import LLM as LLM
