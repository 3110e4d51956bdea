"""Libraries of matrix products: what one must offer, and those that may be installed."""
