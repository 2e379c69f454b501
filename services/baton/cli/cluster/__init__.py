"""`baton doctor cluster`: what a Kubernetes cluster, and a Baton in it, lack."""
