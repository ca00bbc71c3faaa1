"""Brings a stored prefix back: lease, plan, recompute heads, load tails, while the forward already runs.

A waiting request's page keys enter; slots filled with its KV leave, or the engine computes them itself.
The adapter calls it for waiting requests, and around the engine's forward for those that run.
"""

from krul_sglang.engine.restore.draft_loads import DraftLoads
from krul_sglang.engine.restore.heads import Head, RunHeads
from krul_sglang.engine.restore.link import Link
from krul_sglang.engine.restore.load_batch import Load, LoadBatch
from krul_sglang.engine.restore.loading import MAX_STAGED_BYTES, LayerWiseLoader, LoadCounters
from krul_sglang.engine.restore.restore_forward import RestoreForward
from krul_sglang.engine.restore.restore_path import HeadProof, RestoreMode, RestorePath
from krul_sglang.engine.restore.restore_planning import DecodeCosts, RestorePlanning
from krul_sglang.engine.restore.restore_trace import TraceLog
from krul_sglang.engine.restore.returning_request import Prompt
from krul_sglang.engine.restore.returning_requests import ReturningRequests
from krul_sglang.engine.restore.segment_reader import SegmentReader, open_segments
from krul_sglang.engine.restore.state_loads import StateLoads
from krul_sglang.engine.restore.tail_groups import TailGroups
