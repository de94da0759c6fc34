"""How one batch reaches its copies and comes back."""
