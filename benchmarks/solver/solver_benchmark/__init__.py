"""How long the solver takes beside others' rules, how far those are off, and what it gains."""
