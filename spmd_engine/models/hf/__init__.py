"""Models of transformers: configurations and weight names, read and written."""
