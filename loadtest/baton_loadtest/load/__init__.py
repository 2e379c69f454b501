"""`baton loadtest`: requests that leave when they are due, and what became of them."""
