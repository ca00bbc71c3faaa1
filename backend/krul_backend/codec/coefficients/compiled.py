"""The names and types that compiled loops over levels share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RECORD_TOKENS = 64
"""Tokens of a record; the last one of a block may have fewer."""

Levels = NDArray[np.int16]
Scales = NDArray[np.uint8]
Shifts = NDArray[np.int8]
Values = NDArray[np.float32]
Words = NDArray[np.uint16]
Integers = NDArray[np.int64]
Tables = NDArray[np.uint32]
Index = int | np.int64
