"""Arrays that live elsewhere while they are not in use: optimizer state, parameters, saved activations."""
