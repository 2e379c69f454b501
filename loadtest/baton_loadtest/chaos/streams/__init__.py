"""`baton chaos run`: whole streams while processes die, leave and lose each other."""
