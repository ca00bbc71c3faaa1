"""Token sequences with loss weights, from dialogues and from text."""

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from reference_model.corpus import Corpus
from reference_model.dialogues import DialogueWriter, Turn, draw_style
from reference_model.facts import Span, SpanKind
from reference_model.lexicon import Lexicon, Split, open_lexicon, words_of_pieces
from reference_model.smalltalk import paragraph
from reference_model.tokenizer import ASSISTANT_ID, BOS_ID, END_ID, USER_ID, alphabetic_pieces

WEIGHTS: dict[SpanKind, float] = {
    SpanKind.USER: 0.1,
    SpanKind.STATED_VALUE: 0.0,
    SpanKind.ACKNOWLEDGEMENT: 0.1,
    SpanKind.ANSWER: 0.3,
    SpanKind.ANSWER_VALUE: 3.0,
}
_TEXT_WEIGHT = 1.0
_DIALOGUE_SHARE = 0.8
_NUM_WORDS_OF_PIECES = 9000

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class SequenceWriter:
    """Turns dialogues and documents into ids and weights of a fixed length."""

    def __init__(self, tokenizer: Tokenizer, corpus: Corpus) -> None:
        self._tokenizer = tokenizer
        self._corpus = corpus
        vocabulary = corpus.vocabulary()
        pieces = words_of_pieces(alphabetic_pieces(tokenizer), _NUM_WORDS_OF_PIECES, seed=22)
        self._words: dict[Split, Lexicon] = {
            "train_open": open_lexicon(vocabulary),
            "train_pieces": open_lexicon(vocabulary + pieces),
        }
        self._documents = [np.array([BOS_ID, *ids], np.int64) for ids in self._encode(corpus.train)]

    def _encode(self, texts: tuple[str, ...]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def _filler(self, rng: random.Random, num_words: int) -> str:
        write: Callable[[random.Random, int], str] = rng.choice((paragraph, self._corpus.passage))
        return write(rng, num_words)

    def dialogue(
        self, num_tokens: int, rng: random.Random, quiz_share: float, split: Split, answer_weight: float
    ) -> tuple[list[int], list[float]]:
        """One dialogue cut to `num_tokens`; weights[i] is the weight of predicting ids[i].

        With probability `quiz_share` its second half only asks about the first. `answer_weight` is the weight
        of the tokens of an answer around the value.
        """
        words = self._words.get(split, split)
        writer = DialogueWriter(draw_style(num_tokens, rng), words, rng, self._filler)
        is_quiz = quiz_share > 0 and rng.random() < quiz_share
        ids, weights = [BOS_ID], [0.0]
        while len(ids) < num_tokens:
            turn = writer.ask_turn() if is_quiz and len(ids) > num_tokens // 2 else writer.next_turn()
            turn_ids, turn_weights = encode_turn(self._tokenizer, turn, answer_weight)
            ids += turn_ids
            weights += turn_weights
        return ids[:num_tokens], weights[:num_tokens]

    def text(self, num_tokens: int, rng: random.Random) -> tuple[list[int], list[float]]:
        """A window of one document, or a whole document followed by others if it is too short."""
        ids: list[int] = []
        while len(ids) < num_tokens:
            document = rng.choice(self._documents)
            start = rng.randint(0, max(0, len(document) - num_tokens))
            ids += document[start : start + num_tokens].tolist()
        return ids[:num_tokens], [_TEXT_WEIGHT] * num_tokens

    def batch(
        self,
        num_rows: int,
        num_tokens: int,
        rng: random.Random,
        quiz_share: float,
        split: Split,
        answer_weight: float,
    ) -> tuple[IntArray, FloatArray]:
        """`num_rows` sequences: ids int64 and weights float32, both [num_rows, num_tokens]."""
        rows = [
            self.dialogue(num_tokens, rng, quiz_share, split, answer_weight)
            if rng.random() < _DIALOGUE_SHARE
            else self.text(num_tokens, rng)
            for _ in range(num_rows)
        ]
        ids = np.array([row[0] for row in rows], np.int64)
        return ids, np.array([row[1] for row in rows], np.float32)


def encode_spans(tokenizer: Tokenizer, spans: tuple[Span, ...]) -> list[tuple[list[int], SpanKind]]:
    """Token ids of each span. Spans break at word boundaries, so this equals encoding the whole text."""
    encodings = tokenizer.encode_batch_fast([span.text for span in spans], add_special_tokens=False)
    return [(encoding.ids, span.kind) for encoding, span in zip(encodings, spans, strict=True)]


def encode_turn(
    tokenizer: Tokenizer, turn: Turn, answer_weight: float = WEIGHTS[SpanKind.ANSWER]
) -> tuple[list[int], list[float]]:
    """Ids and loss weights of one turn, as the chat template renders it."""
    kinds = {**WEIGHTS, SpanKind.ANSWER: answer_weight}
    ids: list[int] = []
    weights: list[float] = []
    reply_kind = SpanKind.ACKNOWLEDGEMENT if turn.question is None else SpanKind.ANSWER
    for role_id, spans, end_weight in (
        (USER_ID, turn.user, kinds[SpanKind.USER]),
        (ASSISTANT_ID, turn.assistant, kinds[reply_kind]),
    ):
        ids.append(role_id)
        weights.append(kinds[SpanKind.USER])
        for span_ids, kind in encode_spans(tokenizer, spans):
            ids += span_ids
            weights += [kinds[kind]] * len(span_ids)
        ids.append(END_ID)
        weights.append(end_weight)
    return ids, weights
