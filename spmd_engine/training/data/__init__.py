"""Training data: text corpora, files of tokens, arrays and images, as batches of global samples."""
