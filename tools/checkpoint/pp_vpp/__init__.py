"""Pipeline stages to virtual pipeline chunks and back, for legacy ``--ckpt-format torch`` files."""
