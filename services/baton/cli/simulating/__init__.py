"""`baton simulate`: from files to a simulated fleet and its figures."""
