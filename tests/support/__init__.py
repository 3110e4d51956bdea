"""What tests share: models, data and programs that are small enough for tests, and stand-ins for a GPU."""
