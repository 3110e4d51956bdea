"""Weights in Hugging Face's and PEFT's formats: reading and writing."""
