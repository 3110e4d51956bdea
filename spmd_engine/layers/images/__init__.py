"""Layers of images, whose rows, columns and channels may be sharded."""
