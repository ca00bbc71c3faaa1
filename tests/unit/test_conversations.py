from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from demo.conversations import Conversation, ConversationError, UserTurn, load_conversations
from demo.player import play_order
from demo.sizing import SizingError, conversation_tokens, needed_pool_tokens, plan_pools


def write(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "conversations.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


SHAREGPT = {
    "id": "ada",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "The code is 4821."},
        {"from": "gpt", "value": "Noted."},
        {"from": "user", "value": "Which code?", "expected": "4821", "kind": "recall"},
    ],
}
OPENAI = {
    "messages": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ]
}


def test_both_formats_give_the_users_side(tmp_path: Path) -> None:
    loaded = load_conversations(write(tmp_path, [SHAREGPT, OPENAI]))
    assert loaded.conversations == (
        Conversation(
            "ada", (UserTurn("The code is 4821."), UserTurn("Which code?", "4821", "recall")), "Be brief."
        ),
        Conversation("1", (UserTurn("Hello"), UserTurn("Bye")), None),
    )
    assert loaded.num_skipped == 0


def test_jsonl_and_a_single_object_are_read_too(tmp_path: Path) -> None:
    lines = load_conversations(write(tmp_path, f"{json.dumps(SHAREGPT)}\n\n{json.dumps(OPENAI)}\n"))
    assert [c.conversation_id for c in lines.conversations] == ["ada", "1"]
    single = load_conversations(write(tmp_path, json.dumps(SHAREGPT, indent=2)))
    assert single.conversations == lines.conversations[:1]


def test_entries_without_a_user_turn_are_counted_and_left_out(tmp_path: Path) -> None:
    empty = {"id": "empty", "conversations": [{"from": "gpt", "value": "Hi"}]}
    loaded = load_conversations(write(tmp_path, [empty, SHAREGPT]))
    assert [c.conversation_id for c in loaded.conversations] == ["ada"]
    assert loaded.num_skipped == 1


def test_select_cuts_turns_and_takes_what_there_is(tmp_path: Path) -> None:
    loaded = load_conversations(write(tmp_path, [SHAREGPT, OPENAI]))
    assert [len(c.turns) for c in loaded.select(num_conversations=9, turns=1)] == [1, 1]
    assert [c.conversation_id for c in loaded.select(num_conversations=1, turns=None)] == ["ada"]


def test_messages_hold_the_given_answers_and_not_those_of_the_file(tmp_path: Path) -> None:
    conversation = load_conversations(write(tmp_path, [SHAREGPT])).conversations[0]
    assert conversation.messages(2, {1: "from the reference"}) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "The code is 4821."},
        {"role": "assistant", "content": "from the reference"},
        {"role": "user", "content": "Which code?"},
    ]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("not json", r": not JSON: "),
        ('{"messages": []}\n{oops}', r": line 2 is not JSON: "),
        ({"items": []}, r": expected a list of entries"),
        ([7], r": entry 0: Expected `object`, got `int`"),
        ([SHAREGPT, {"id": "x"}], r": entry 1: expected a key 'conversations' or 'messages', got \['id'\]"),
        ([{"messages": "hi"}], r": entry 0: Expected `array.*`, got `str` - at `\$\.messages`"),
        ([{"messages": [None]}], r": entry 0: Expected `object`, got `null` - at `\$\.messages\[0\]`"),
        (
            [{"messages": [{"role": "user"}]}],
            r": entry 0: .* missing required field `content` - at `\$\.messages\[0\]`",
        ),
        (
            [{"conversations": [{"from": "human", "value": 3}]}],
            r": entry 0: Expected `str`, got `int` - at `\$\.conversations\[0\]\.value`",
        ),
        (
            [{"conversations": [{"from": "robot", "value": "x"}]}],
            r": entry 0, turn 0: expected human, user, gpt, assistant or system, got 'robot'",
        ),
        (
            [{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}],
            r": entry 0, turn 1: a system turn is expected only as turn 0",
        ),
        (
            [{"messages": [{"role": "user", "content": "a", "expected": 5}]}],
            r": entry 0: Expected `str.*`, got `int` - at `\$\.messages\[0\]\.expected`",
        ),
        (
            [{"messages": [{"role": "user", "content": "a", "expected": ""}]}],
            r": entry 0: Expected `str` of length >= 1 - at `\$\.messages\[0\]\.expected`",
        ),
        ([{**SHAREGPT, "id": None}], r": entry 0: Expected `.*str.*`, got `null` - at `\$\.id`"),
        ([SHAREGPT, SHAREGPT], r": two entries have the id 'ada'"),
        ([], r": no entry has a user turn; got 0 entries"),
    ],
)
def test_errors_name_the_file_the_entry_and_the_turn(tmp_path: Path, document: Any, problem: str) -> None:
    path = write(tmp_path, document)
    with pytest.raises(ConversationError, match=problem) as caught:
        load_conversations(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConversationError, match=r"missing\.json: no such file"):
        load_conversations(tmp_path / "missing.json")


def conversation(name: str, *texts: str) -> Conversation:
    return Conversation(name, tuple(UserTurn(text) for text in texts))


def test_play_order_runs_all_others_between_two_turns_of_one() -> None:
    conversations = [conversation("a", "1", "2", "3"), conversation("b", "1"), conversation("c", "1", "2")]
    order = [(c.conversation_id, turn) for c, turn in play_order(conversations)]
    assert order == [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("c", 2), ("a", 3)]


def count_characters(messages: list[dict[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)


def test_conversation_tokens_count_every_answer_at_its_full_length() -> None:
    assert conversation_tokens(conversation("a", "x" * 10, "y" * 5), count_characters, max_tokens=7) == 29


@pytest.mark.parametrize(("num_tokens", "page_size", "needed"), [(100, 16, 176), (1, 1, 65), (100, 64, 384)])
def test_needed_pool_is_whole_pages_with_a_margin(num_tokens: int, page_size: int, needed: int) -> None:
    assert needed_pool_tokens(num_tokens, page_size=page_size) == needed


def test_default_pool_holds_the_longest_conversation_but_not_all() -> None:
    conversations = [conversation("a", "x" * 900), conversation("b", "x" * 990), conversation("c", "x" * 500)]
    pools = plan_pools(
        conversations, count_characters, max_tokens=10, page_size=16, device_tokens=None, context_length=None
    )
    assert (pools.longest_tokens, pools.total_tokens) == (1000, 2420)
    assert pools.device_tokens == 1328  # 1.25 x 1000 + 64, in pages of 16
    assert pools.reference_tokens >= pools.total_tokens * 1.25


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"device_tokens": 1000}, r"--device-tokens 1000 is too small: .*'b'.* at least 1072 are needed"),
        ({"device_tokens": 9000}, r"fit into the device pool of 9000: nothing would leave it"),
        ({"context_length": 512}, r"'b' needs up to 1000 tokens, but the model's context is 512"),
    ],
)
def test_impossible_sizes_say_what_is_needed(changes: dict[str, int], problem: str) -> None:
    conversations = [conversation("a", "x" * 900), conversation("b", "x" * 990)]
    settings: dict[str, Any] = {
        "max_tokens": 10,
        "page_size": 16,
        "device_tokens": None,
        "context_length": None,
    }
    with pytest.raises(SizingError, match=problem):
        plan_pools(conversations, count_characters, **{**settings, **changes})
