"""The roles of workers, in the order in which a request meets them."""

WORKER_ROLES = ("tokenizer", "prefill", "decode", "detokenizer")
