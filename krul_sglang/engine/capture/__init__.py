"""Observes attention while the engine computes, for the requests whose turns will be stored.

Queries enter from hooks on the attention modules; per turn the recorded query rows leave, or statistics made
of them. ``attach`` installs it; ``save`` takes what it recorded.
"""

from krul_sglang.engine.capture.query_capture import CapturePlan, QueryCapture, unrecorded
from krul_sglang.engine.capture.turn_capture import CapturedTurn, QueryShape
