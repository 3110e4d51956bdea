"""What is trained on: text corpora, files of tokens, arrays and images, as batches of global samples."""
