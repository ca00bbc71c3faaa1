"""What holds for a store in this process holds for one behind sockets: the same tests, another ``store``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_fast_copies import (  # noqa: F401
    test_a_lease_of_nothing_but_them_ends_where_there_is_none,
    test_a_lease_that_serves_no_request_is_no_lookup,
    test_they_can_be_dropped_and_stay_with_who_has_a_lease,
)
from test_host_store import (  # noqa: F401
    test_a_cleared_segment_keeps_its_bytes_until_the_last_release,
    test_a_commit_needs_a_checksum_for_each_range,
    test_a_lease_can_start_and_end_inside_segments,
    test_a_lease_crosses_segments_and_ends_at_the_first_gap,
    test_a_miss_is_none_and_counted,
    test_a_request_that_branches_off_gets_the_common_pages,
    test_a_reservation_is_settled_once,
    test_a_reservation_larger_than_the_arena_evicts_nothing,
    test_a_reservation_that_pinned_bytes_leave_no_room_for_evicts_nothing,
    test_a_segment_with_one_new_page_stays,
    test_a_slice_at_another_position_ends_the_prefix,
    test_a_wrong_report_of_damage_changes_nothing,
    test_a_wrong_token_ends_the_prefix_before_its_page,
    test_byte_counts,
    test_changing_the_callers_token_ids_later_changes_nothing,
    test_clear_drops_what_was_reserved_before_it,
    test_clearing_another_model_drops_nothing,
    test_codec_params_that_cannot_be_kept_are_refused,
    test_committing_a_turn_keeps_the_head_of_its_conversation,
    test_leased_segments_are_never_evicted,
    test_leasing_from_the_middle_keeps_what_comes_before,
    test_missing_pages_come_as_maximal_runs,
    test_models_never_meet,
    test_nobody_sees_a_segment_before_its_commit,
    test_other_sizes_than_reserved_are_refused_and_freed,
    test_pages_committed_by_another_keep_their_first_copy,
    test_release_is_once,
    test_reservations_of_no_block_or_of_less_than_nothing_are_refused,
    test_space_is_made_from_the_least_recently_used,
    test_tails_leave_before_heads_and_whole_segments_leave,
    test_tenants_never_meet,
    test_the_same_pages_can_be_stored_again_beside_their_zombie,
    test_token_ids_of_the_wrong_length_are_an_error,
    test_two_threads_that_commit_the_same_pages_leave_one_segment,
    test_what_was_written_comes_back,
)

from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.eviction import LruPolicy
from krul_backend.tiers.dram.host_store import HostStore
from tests.support.daemon_builders import WatchedStore, serving
from tests.support.store_builders import make_model


@pytest.fixture
def store() -> Iterator[WatchedStore]:
    """A daemon of the size that the tests count on, and a client of it."""
    with serving(TieredStore(HostStore(4096, LruPolicy()))) as runtime_dir:
        store = WatchedStore(runtime_dir, model=make_model(), request_timeout_s=10.0)
        yield store
        store.close()
    assert (store.counters.timeouts, store.counters.failures, store.counters.lost) == (0, 0, 0)
