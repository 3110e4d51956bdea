"""Weights in Hugging Face's and PEFT's formats, read and written."""
