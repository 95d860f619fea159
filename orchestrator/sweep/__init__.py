"""Many jobs as one: what each left, what it comes to, which of them need not be done again."""
