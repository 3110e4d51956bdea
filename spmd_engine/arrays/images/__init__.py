"""Operations on images: convolution, pooling, and the statistics of channels."""
