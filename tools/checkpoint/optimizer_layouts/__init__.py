"""What ``convert_ckpt_optimizer.py`` is made of."""
