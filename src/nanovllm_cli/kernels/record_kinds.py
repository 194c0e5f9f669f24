"""What the numbers of a packed integer weight can be: shared by the kernels that read records and by `quant/cpu_records.py`,
which describes and fills them."""

from __future__ import annotations

TILE = 64
"""Output columns (rows of the weight) of a record."""
CHUNK = 256
"""Codes along k of a record, at most."""
STEP = 32
"""Codes along k that are packed together: what a record's length is a multiple of."""

F32, F16, BF16, E8M0, SUB_U8, SUB_I8 = range(6)
"""Kinds of scale. SUB_*: whole numbers that an f16 a record multiplies (GGUF's super-blocks). E8M0: 2**(byte - 128), half of what
the byte says elsewhere, for codes that are twice the value (fp4's are 0.5 apart)."""
NO_LOW, ZERO, MIN, SUB_MIN, NIBBLE = range(5)
"""Kinds of what is taken off. ZERO: u8 codes; MIN: f16, added; SUB_MIN: u8 times an f16 a record; NIBBLE: the same, in the upper
half of the scale's byte."""
