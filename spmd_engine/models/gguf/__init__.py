"""Models of llama.cpp: configurations and tensor names in GGUF files."""
