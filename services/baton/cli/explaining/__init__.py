"""`baton explain` and `baton replay`: what became of one request, and its tokens once more."""
