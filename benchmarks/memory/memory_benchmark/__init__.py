"""Memory of large models: `experiments`, `estimate`, `balances`, `count`, `measure`, `tables`."""
