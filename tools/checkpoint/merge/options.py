"""Names that options take; apart from their meaning, so that ``--help`` needs no torch."""

SAVE_DTYPES = ('same', 'float32', 'float16', 'bfloat16')
BYTE_ACCOUNTING = ('rank0', 'each-rank', 'all', 'none')
