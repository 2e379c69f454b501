"""The prefill process: computes prompts and gives their KV away."""
