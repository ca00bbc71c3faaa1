"""``krul-sglang why``: where the tokens of the last prompts came from, and why the others were computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import httpx
import msgspec

from krul_sglang.cli.server_client import CannotRunError, open_client, request, states_with_krul
from krul_sglang.reasons import MEDIA_IDS_FROM, REASONS, Parting, RequestReasons

DEVICE, HEAD, COMPUTED = "device", "head", "computed"

_MEDIA = "an image or sound"
_DROPPED = "their turn was not stored whole: "
_SENTENCES = {
    "new": "nothing that was stored goes on like this",
    "evicted": "they were stored, and have left every tier since, because others needed the room",
    "between": "they were stored, but this model goes on only where a turn ended, with the state there",
    "demoted": "they were stored, and left memory before others, because their conversation had ended",
    "cleared": "they were stored, and a flush dropped them",
    "weights": "they were stored with other weights than those that serve now",
    "waiting": "the turn that they belong to was still being stored",
    "hint": "a hint said that they are not to be kept",
    "dropped: evicted": f"{_DROPPED}the device gave its memory away before it was read",
    "dropped: no room": f"{_DROPPED}host memory had no room",
    "dropped: no answer": f"{_DROPPED}the daemon did not answer",
    "dropped: error": f"{_DROPPED}an error, which the server's log has",
    "unreachable": "the daemon could not be asked",
    "late": "the daemon's answer came too late",
    "given back": "they were stored, but their lease had ended when the request began",
    "sooner": "they were stored, but computing them was planned to be sooner than loading them",
    "unreadable": "they were stored in a way that cannot be decoded here, and are stored again",
    "bases": "they were stored in bases that this server does not have yet",
    "no room": "they were stored, but memory had no room for what the tiers below it had of them",
    "unplannable": "they were stored, but not on every rank, or reading their tier has no known cost yet",
    "changed": "they were stored, but what was on the device had changed since they were found",
    "unused": "they were stored, but no load was planned: no room on the device, or the request waits",
    "end": "the last token always is, and only whole pages are restored",
    "unknown": "why is not known yet",
}


@dataclass(frozen=True)
class Piece:
    """Tokens ``[first, end)`` of a prompt. ``source`` is the device, a tier, or a recomputed head; or they
    were computed, and ``why``."""

    first: int
    end: int
    source: str
    why: str = ""


@dataclass(frozen=True)
class Texts:
    """What stands around the place where a prompt parts from what was stored, decoded if the server can."""

    common: str
    here: str
    stored: str


def fetch_reasons(
    url: str, *, rid: str | None, last: int, api_key: str | None, timeout_s: float
) -> list[tuple[RequestReasons, Texts | None]]:
    """Fetch what the server at ``url`` knows of request ``rid``, or of the ``last`` requests of each rank.

    Raises:
        CannotRunError: the server cannot be reached, runs without krul or with another version of it, or does
            not know the request, or any.
    """
    with open_client(url, api_key=api_key, timeout_s=timeout_s) as client:
        states = states_with_krul(client, request(client, "GET", "/server_info"))
        try:
            of_ranks = [msgspec.json.decode(state[REASONS], type=list[RequestReasons]) for state in states]
        except (KeyError, TypeError, msgspec.MsgspecError) as error:
            raise CannotRunError(
                f"the server at {url} runs another version of krul-sglang: it tells of requests in another "
                f"way ({error!r})"
            ) from None
        found = [reasons for of_rank in of_ranks for reasons in (of_rank if rid else of_rank[-last:])]
        if rid is not None:
            found = [reasons for reasons in found if reasons.rid == rid]
            if not found:
                raise CannotRunError(
                    f"the server at {url} does not know request {rid!r}: it keeps the last "
                    f"{max(map(len, of_ranks))}, by the id that their answers have"
                )
        if not found:
            raise CannotRunError(f"the server at {url} has had no request yet")
        return list(zip(found, _decoded(client, [reasons.parting for reasons in found]), strict=True))


def pieces_of(reasons: RequestReasons) -> list[Piece]:
    """The whole prompt, from its first token on, cut by where its tokens came from."""
    start = reasons.device_tokens
    pieces = [Piece(0, start, DEVICE)]
    loaded_end = reasons.loaded[-1].end if reasons.loaded else start
    head_end = min(max(reasons.head_ends[0], start), loaded_end)
    if reasons.failed:
        head_end, loaded_end = start, reasons.salvaged_end
    pieces.append(Piece(start, head_end, HEAD))
    pieces += [Piece(max(run.first, head_end), min(run.end, loaded_end), run.what) for run in reasons.loaded]
    found_end = max(reasons.found_end, loaded_end)
    declined = "failed" if reasons.failed else reasons.declined or "unused"
    pieces.append(Piece(loaded_end, found_end, COMPUTED, declined))
    end = found_end
    for run in reasons.missing:
        why = "late" if (run.what, reasons.declined) == ("unknown", "late") else run.what
        # What goes on anew does so to its end.
        run_end = reasons.num_tokens if why in ("new", "parted") else run.end
        pieces.append(Piece(end, max(end, run_end), COMPUTED, why))
        end = max(end, run_end)
    pieces.append(Piece(end, reasons.num_tokens, COMPUTED, "end"))
    return [piece for piece in pieces if piece.first < piece.end]


def sentences(reasons: RequestReasons, texts: Texts | None) -> list[str]:
    """Where the tokens came from, a sentence for each piece."""
    return [_sentence(piece, reasons, texts) for piece in pieces_of(reasons)]


def to_json(reasons: RequestReasons, texts: Texts | None) -> dict[str, Any]:
    parting = None
    if reasons.parting is not None and texts is not None:
        parting = {"token": reasons.parting.token, **asdict(texts)}
    return {
        "request": reasons.rid,
        "tokens": reasons.num_tokens,
        "pieces": [asdict(piece) for piece in pieces_of(reasons)],
        "parting": parting,
        "error": reasons.failed or None,
        "sentences": sentences(reasons, texts),
    }


def print_table(found: Sequence[tuple[RequestReasons, Texts | None]], console: Any) -> None:
    """Print a row for each request: how many tokens came from where, and why others were computed."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("request", overflow="fold")
    for name in ("tokens", DEVICE, "host", HEAD, COMPUTED):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=1)
    for reasons, texts in found:
        pieces = pieces_of(reasons)
        counts: Counter[str] = Counter()
        for piece in pieces:
            source = piece.source if piece.source in (DEVICE, HEAD, COMPUTED) else "host"
            counts[source] += piece.end - piece.first
        why = [_sentence(piece, reasons, texts) for piece in pieces if _is_told(piece)]
        numbers = (reasons.num_tokens, *(counts[source] for source in (DEVICE, "host", HEAD, COMPUTED)))
        table.add_row(Text(reasons.rid), *map(str, numbers), Text("\n".join(why)))
    console.print(table)


def _is_told(piece: Piece) -> bool:
    return piece.source == COMPUTED and piece.why != "end"


def _sentence(piece: Piece, reasons: RequestReasons, texts: Texts | None) -> str:
    return f"{_tokens(piece)} {_said(piece, reasons, texts)}"


def _tokens(piece: Piece) -> str:
    if piece.end - piece.first == 1:
        return f"Token {piece.first}"
    return f"Tokens {piece.first} to {piece.end - 1}"


def _said(piece: Piece, reasons: RequestReasons, texts: Texts | None) -> str:
    verb = "was" if piece.end - piece.first == 1 else "were"
    if piece.source == DEVICE:
        return f"{verb} on the device."
    if piece.source == HEAD:
        last = max(0, reasons.head_ends[1] - reasons.device_tokens)
        return (
            f"{verb} recomputed as the head of what was loaded: all in the first layer, {last} in the last."
        )
    if piece.source != COMPUTED:
        return f"came from {piece.source}."
    if piece.why == "failed":
        return f"{verb} computed: the load failed, or came late ({reasons.failed})."
    parting = reasons.parting
    if piece.why == "parted" and parting is not None and texts is not None:
        return (
            f"{verb} computed: the prompt parts from what was stored at token {parting.token}. After "
            f"{texts.common} it has {texts.here}, where {texts.stored} was stored."
        )
    return f"{verb} computed: {_SENTENCES.get(piece.why, piece.why)}."


def _decoded(client: httpx.Client, partings: Sequence[Parting | None]) -> list[Texts | None]:
    """The tokens around each parting as quoted text; as numbers if the server has no tokenizer."""
    runs = [
        _parts(tokens)
        for parting in partings
        if parting
        for tokens in (parting.common, parting.here, parting.stored)
    ]
    texts = iter(_texts(client, [part for parts in runs for part in parts if part is not None]))
    shown = iter([" and ".join(_MEDIA if part is None else next(texts) for part in parts) for parts in runs])
    return [None if parting is None else Texts(next(shown), next(shown), next(shown)) for parting in partings]


def _parts(tokens: Sequence[int]) -> list[list[int] | None]:
    """The runs of text in a few tokens, and None for each image or sound between them."""
    parts = [
        None if is_media else list(run)
        for is_media, run in groupby(tokens, lambda token: token >= MEDIA_IDS_FROM)
    ]
    return parts or [[]]


def _texts(client: httpx.Client, runs: list[list[int]]) -> list[str]:
    if not runs:
        return []
    payload = {"tokens": runs, "skip_special_tokens": False}
    try:
        return [repr(text) for text in request(client, "POST", "/detokenize", payload)["text"]]
    except (CannotRunError, KeyError):
        return [f"the tokens {', '.join(map(str, tokens))}" for tokens in runs]
