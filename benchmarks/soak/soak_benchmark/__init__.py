"""Many small steps with faults, and what must not grow or differ in them."""
