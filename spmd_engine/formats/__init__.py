"""Files of other programs (images, arrays, texts, safetensors, GGUF), and files of tokens."""
