"""Speed on 1, 2, 4 and 8 devices: `published`, `devices`, `predict`, `simulate`, `measure`."""
