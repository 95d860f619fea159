"""Which entries of a tier go when it is full (`base`, and one module a policy), and which come in
(`admission`). `registry` finds them by name, a user's own among them."""
