"""Writes the demo conversations: `python -m reference_model.export_conversations --out FILE`.

Each conversation has five or six user turns. Every turn from the second on ends with a question about an
earlier turn, so a right answer needs the history. All text is this package's own. The words are those of
the training split, which the model spells reliably; the dialogues are new. The gpt messages are reference
answers, not what the model says.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from reference_model.dialogues import DialogueWriter, Style, message_text
from reference_model.facts import Kind
from reference_model.sequences import encode_turn

BUNDLED_SEED, BUNDLED_COUNT = "bundled", 24
MIN_TOKENS, MAX_TOKENS = 700, 1300
_NUM_TURNS = (5, 6)
_FILLER_WORDS = (30, 110)
# Every second conversation has a harder kind in it, in turn.
_HARDER: tuple[tuple[Kind, ...], ...] = (("two_hop",), ("overwritten",), ("counting",))

Conversation = dict[str, Any]
"""ShareGPT: `id` and `conversations`; a human turn that asks has `expected` and `kind` as well."""


def write_conversation(name: str, tokenizer: Tokenizer, harder: tuple[Kind, ...], seed: str) -> Conversation:
    """One conversation of MIN_TOKENS to MAX_TOKENS tokens that has a question of each kind in `harder`."""
    for attempt in range(2000):
        conversation = _attempt(name, tokenizer, harder, random.Random(f"{seed}/{name}/{attempt}"))
        if conversation is not None:
            return conversation
    raise ValueError(f"found no conversation {name!r} with the kinds {harder!r}")


def _attempt(
    name: str, tokenizer: Tokenizer, harder: tuple[Kind, ...], rng: random.Random
) -> Conversation | None:
    style = Style(
        max_filler_words=_FILLER_WORDS[1],
        demo=True,
        ask_weight=0,
        links="two_hop" in harder,
        teams="counting" in harder,
        corrections=0.5 if "overwritten" in harder else 0.0,
    )
    writer = DialogueWriter(style, "train", rng)
    num_turns = rng.choice(_NUM_TURNS)
    messages: list[dict[str, str]] = []
    asked: set[str] = set()
    kinds_seen: set[str] = set()
    num_tokens = 1
    for index in range(num_turns):
        # The harder kinds come late, when enough has been stated.
        wanted = harder if index >= num_turns - 1 - len(harder) else ()
        kinds: tuple[Kind, ...] = (*wanted, "single") if index else ()
        num_words = rng.randint(*_FILLER_WORDS)
        turn = writer.demo_turn(rng.randint(2, 3) if index < 3 else 1, num_words, kinds, frozenset(asked))
        if turn is None:
            return None
        num_tokens += len(encode_turn(tokenizer, turn)[0])
        human = {"from": "human", "value": message_text(turn.user)}
        if turn.question is not None:
            expected = turn.question.values[-1]
            asked.add(expected)
            kinds_seen.add(turn.question.kind)
            human |= {"expected": expected, "kind": turn.question.kind}
        messages += [human, {"from": "gpt", "value": message_text(turn.assistant)}]
    if not set(harder) <= kinds_seen or not MIN_TOKENS <= num_tokens <= MAX_TOKENS:
        return None
    return {"id": name, "conversations": messages}


def write_conversations(tokenizer: Tokenizer, seed: str, count: int) -> list[Conversation]:
    """`count` conversations; other seeds give other conversations of the same kind."""
    return [
        write_conversation(
            f"{seed}-{index:02d}", tokenizer, _HARDER[index // 2 % len(_HARDER)] if index % 2 else (), seed
        )
        for index in range(count)
    ]


def export_conversations(
    model: Path, out: Path, seed: str = BUNDLED_SEED, count: int = BUNDLED_COUNT
) -> None:
    """Writes `count` conversations to `out`; `model` is the folder of the tokenizer that counts tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(write_conversations(tokenizer, seed, count), indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seed", default=BUNDLED_SEED, help="other seeds give held-out conversations")
    parser.add_argument("--count", type=int, default=BUNDLED_COUNT)
    args = parser.parse_args()
    export_conversations(args.model, args.out, args.seed, args.count)


if __name__ == "__main__":
    main()
