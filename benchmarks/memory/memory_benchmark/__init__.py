"""Memory of large models: `experiments`, `estimate`, `balances`, `measure`, `tables`."""
