"""What ``weighted_merge.py`` is made of, one job a module."""
