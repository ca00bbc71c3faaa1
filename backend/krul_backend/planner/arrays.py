"""Arrays of the planners."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]
Flags = NDArray[np.bool_]
