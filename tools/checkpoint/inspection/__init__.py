"""What ``inspect_checkpoint.py`` is made of."""
