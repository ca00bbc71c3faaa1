"""Byte-level BPE of 2048 tokens in Hugging Face format, with a prefix-stable chat template.

The template writes a space before every message text and the end token after it, and the model answers
in the same shape. Words, digits and punctuation are split before merging, so the tokens of a text do not
depend on what follows it: the ids of a generated answer are the ids of that answer in the next request.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from reference_model.corpus import Corpus
from reference_model.dialogues import DialogueWriter, draw_style, message_text

VOCABULARY_SIZE = 2048
BOS, END, USER, ASSISTANT = "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, END, USER, ASSISTANT)
BOS_ID, END_ID, USER_ID, ASSISTANT_ID = range(4)
MAX_POSITIONS = 2048

_WORD_PATTERN = r"'s| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# System messages become leading text of the next user message: the model was trained on two roles.
CHAT_TEMPLATE = """
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content | trim }}
{%- elif content is iterable -%}
{%- for part in content if part.type == 'text' -%}
{{ ' ' if not loop.first }}{{ part.text | trim }}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- '<|bos|>' -}}
{%- set ns = namespace(leading='') -%}
{%- for message in messages -%}
{%- set text = text_of(message.content) -%}
{%- if message.role in ['system', 'developer'] -%}
{%- set ns.leading = ns.leading + ' ' + text -%}
{%- elif message.role == 'user' -%}
{{- '<|user|>' + ns.leading + ' ' + text + '<|end|>' -}}
{%- set ns.leading = '' -%}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' + ' ' + text + '<|end|>' -}}
{%- else -%}
{{- raise_exception('roles are system, developer, user and assistant, not ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
""".strip().replace("\n", "")


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A BPE tokenizer of `VOCABULARY_SIZE` tokens; special tokens have the ids 0 to 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def training_texts(corpus: Corpus, seed: int, num_dialogues: int = 4000) -> Iterator[str]:
    """Texts for the BPE: dialogues of the training split and a sample of the corpus."""
    rng = random.Random(seed)
    for _ in range(num_dialogues):
        writer = DialogueWriter(draw_style(512, rng), "train", rng)
        for _ in range(8):
            turn = writer.next_turn()
            yield " " + message_text(turn.user)
            yield " " + message_text(turn.assistant)
    for document in corpus.train_passages:
        yield document
    for document in rng.sample(corpus.train, len(corpus.train) // 6):
        yield document


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files that `AutoTokenizer` reads, the chat template among them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": END, "pad_token": END}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        **names,
        "additional_special_tokens": [USER, ASSISTANT],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    special = {**names, "additional_special_tokens": [USER, ASSISTANT]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def alphabetic_pieces(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The tokens that are ASCII letters only, sorted; one that begins a word has its space in front."""
    pieces = (token.replace("\u0120", " ") for token in tokenizer.get_vocab())
    return tuple(sorted(piece for piece in pieces if re.fullmatch(r" ?[A-Za-z][a-z]*", piece)))
