"""Predicted against measured: `models`, `settings`, `measure` and `parts`, `figures`, `tables`."""
