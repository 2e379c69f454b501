"""LoRA adapters: files of peft's, and what they add to a model's linear layers, row by row.

In: an adapter's folder, and plans whose chunks name adapters by digest. Out: logits as if every
sequence had been computed by the model with its own adapter. `files` reads and refuses, `store`
keeps adapters within two bounds of memory and adds them to a step.
"""
