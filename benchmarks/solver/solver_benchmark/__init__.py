"""How long the solver and others' rules take, how far those are off, and what the solver gains."""
