"""Stores a finished turn: choose a strategy, encode, copy to the store, off the scheduler's thread.

A ``Turn`` enters with its slots on the device; committed segments leave. The adapter calls it when a
request ends.
"""

from krul_sglang.engine.save.allocation import SpaceAllocation
from krul_sglang.engine.save.companion_saving import CompanionSaver
from krul_sglang.engine.save.draft_saving import DraftSaver
from krul_sglang.engine.save.later_encoding import copy_room
from krul_sglang.engine.save.offload import MAX_LAYER_BYTES, Job, TurnOffloader
from krul_sglang.engine.save.request_hints import RequestHints
from krul_sglang.engine.save.segment_writer import OffloadCounters
from krul_sglang.engine.save.state_saving import StateSaver
from krul_sglang.engine.save.strategy_choice import Decision, SelectorDecision
from krul_sglang.engine.save.turn import StoredPath, Turn, TurnOwner, owner_of
from krul_sglang.engine.save.turn_encoding import LayerEncoding, TurnEncoding
