"""Keeps what compression may cost a conversation within ``error_budget``.

Turns and probes of the running model enter; a strategy per turn leaves, with the damage that it adds.
``save`` asks it through its interface for decisions; the adapter runs its probes when the server is idle.
"""

from krul_sglang.engine.budget.coarse import COARSE
from krul_sglang.engine.budget.error_budget import ErrorBudget
from krul_sglang.engine.budget.probing import History, Prober, RunOnHistory
from krul_sglang.engine.budget.provenance import KvProvenance
from krul_sglang.engine.budget.served_bases import RecentText, ServedBases, TextDrift, show
from krul_sglang.engine.budget.shared_bases import OlderBases, SharedBases
