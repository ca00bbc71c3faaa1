"""What of a conversation need not be stored, because it would be recomputed anyway."""

from __future__ import annotations

from dataclasses import replace

from krul_backend.planner.costs import RestoreCosts
from krul_backend.planner.interface import RestorePlanner
from krul_backend.planner.problem import RestoreProblem, StoredRun


def allocate(
    planner: RestorePlanner,
    conversation: StoredRun,
    costs: RestoreCosts,
    page_size: int,
    new_tokens: int,
    max_head_tokens: int | None = None,
    max_lengths: int = 8,
) -> tuple[int, ...]:
    """Head ends that ``planner`` would recompute if the whole conversation came back from its tier.

    ``conversation``: tokens ``[0, end_token)`` as they would be stored in full, from the tier they would come
    back from (the paper's space allocation ``C = {c (1 - r_c)} x N``, 6.1, but layer by layer).
    ``new_tokens``: expected with the next turn. All of the tokens where recomputing them all is faster than
    any restore.
    """
    num_layers = len(conversation.layer_token_bytes)
    stored = replace(conversation, stored_from=(conversation.first_token,) * num_layers)
    problem = RestoreProblem(
        num_layers=num_layers,
        page_size=page_size,
        device_tokens=conversation.first_token,
        total_tokens=conversation.end_token,
        new_tokens=new_tokens,
        runs=(stored,),
        costs=costs,
        max_head_tokens=max_head_tokens,
        max_lengths=max_lengths,
    )
    return planner.plan(problem).head_ends
