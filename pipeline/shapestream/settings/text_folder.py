"""A folder with a text model, as sentence-transformers and optimum lay it out, as the settings of what serves it.

`expand` is pure: it takes the contents of the folder's files, and returns raw values as the YAML has them. They are then
checked like any other. For a folder's model NAME they are

    NAME.tokens    the tokenizer
    NAME.encoder   the ONNX or IR file, with its pooling
    NAME           a chain of both: text in, an embedding and the number of tokens of each text out

A folder whose model classifies texts, or pairs of them (a cross-encoder), has the output `logits` instead of vectors. Its
tokenizer makes pairs of a query and texts, cut where they are too long, and its chain gives the scores of each.

Each value has its file, as a `Fact`, for `shapestream check`. What the YAML states about the model is put over the values of
the files. Where files contradict each other in a way that changes answers, that is a problem, not a choice made here.

| file | read for |
|---|---|
| tokenizer.json | the tokenizer; the largest id |
| config.json | hidden_size, vocab_size, type_vocab_size, pad_token_id, max_position_embeddings, model_type |
| config.json | of a model that classifies, architectures and id2label |
| modules.json | the steps after the encoder: pooling, normalization; others are refused |
| N_Pooling/config.json | the pooling, and the size of the vector |
| sentence_bert_config.json | max_seq_length, do_lower_case |
| tokenizer_config.json | model_max_length, pad_token |
| special_tokens_map.json | pad_token, where tokenizer_config.json has none |
| config_sentence_transformers.json | the default prompt, which stands before every text |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeAlias

from shapestream.settings.version_settings import ROUTING
from shapestream.versions import versioned
from shapestream_engine.backends.registry import engines_of_path
from shapestream_engine.port_names import VECTORS, PortNames, vectors_among

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
POOLED = "sentence_embedding"
"""The output of a model that pools by itself, as sentence-transformers exports it; and that of our pooling."""
LOGITS = "logits"
"""The output of a model that classifies texts, or pairs of them: a number for each label."""
CLASSIFIER = "ForSequenceClassification"
"""End of the name of such a model's architecture."""
TOKENIZER, CONFIG, MODULES = "tokenizer.json", "config.json", "modules.json"
SENTENCE, TOKENIZER_CONFIG, SPECIAL = (
    "sentence_bert_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
PROMPTS = "config_sentence_transformers.json"
DOCUMENTS = (TOKENIZER, CONFIG, MODULES, SENTENCE, TOKENIZER_CONFIG, SPECIAL, PROMPTS)
"""The documents that are read where they are there."""
IR_FILES = ("openvino/openvino_model.xml", "openvino_model.xml")
ONNX_FILES = ("onnx/model.onnx", "model.onnx")
MODEL_FILES = (*IR_FILES, *ONNX_FILES)
"""The model files of the layouts, in the order in which they are taken."""
_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": None,
    "pooling_mode_lasttoken": "last",
}
"""Key of a pooling's config -> our mode; None for a mode that we do not have."""
_WORDS = {"cls": "cls", "max": "max", "mean": "mean", "lasttoken": "last"}
"""Word of a pooling's config -> our mode."""
_OFFSET_POSITIONS = (
    "roberta",
    "xlm-roberta",
    "camembert",
    "mpnet",
    "xlm-roberta-xl",
    "longformer",
    "data2vec-text",
)
"""Types of models whose positions are counted from pad_token_id + 1, so that as many positions are lost."""
_MOST_TOKENS = 1 << 24
"""A larger `model_max_length` means none."""
AT_MOST_TEXTS = 2048
"""Texts of one request: as many as OpenAI's clients send."""
_EXPORT = (
    "optimum exports one: optimum-cli export onnx --task {task} --model FOLDER FOLDER/onnx, or "
    "optimum-cli export openvino --task {task} --model FOLDER FOLDER/openvino"
)
_SAVE = "transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"

_OPTIONS = "max_tokens, truncate, prompt"
"""What the YAML may say of a folder's tokenizer."""
MOST_LABEL_CHARACTERS = 16_384
"""Characters of all labels of a model, at most: a gateway is told them in one argument of its command line, which Linux
bounds at 128 KiB."""

Problem: TypeAlias = "tuple[tuple[str | int, ...], str]"
"""The key of the model that could change it, and what is wrong, with the remedy in brackets."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a file of the folder says."""

    words: str
    file: str

    def __str__(self) -> str:
        return f"{self.words} ({self.file})"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderContents:
    """The contents of a folder's files: all that `expand` knows of it."""

    folder: str
    """Its absolute path."""
    documents: Mapping[str, Any]
    """Each JSON file that is there, by its path in the folder."""
    ports: Mapping[str, PortNames]
    """Each model file that is there, by its path in the folder."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Each file that is there and cannot be read, and why."""
    installed: frozenset[str] = frozenset()
    """The engines that are installed."""


@dataclass(slots=True, kw_only=True)
class TextFolder:
    """A folder's model: the values that serve it, and where each comes from."""

    name: str
    folder: str
    tokens: dict[str, Any] = field(default_factory=dict)
    """A model of the YAML, the tokenizer."""
    encoder: dict[str, Any] = field(default_factory=dict)
    """A model of the YAML."""
    chain: dict[str, Any] = field(default_factory=dict)
    """A chain of the YAML."""
    labels: tuple[str, ...] = ()
    """The names of the scores of a model that classifies."""
    facts: list[Fact] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is not done as the folder says, or cannot be known, and does no harm by itself."""
    problems: list[Problem] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield the facts and notes as lines of text."""
        yield f"folder {self.name}: {self.folder}"
        yield from (f"  {fact}" for fact in self.facts)
        yield from (f"  note: {note}" for note in self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return facts and notes for a script."""
        facts = [{"fact": fact.words, "file": fact.file} for fact in self.facts]
        return {"name": self.name, "folder": self.folder, "facts": facts, "notes": self.notes}


def expand(name: str, given: Mapping[str, Any], contents: FolderContents) -> TextFolder:
    """Return the models and the chain of a folder; `given` is the model in the YAML, whose `path` is the folder."""
    made = TextFolder(name=name, folder=contents.folder)
    _Expansion(made, given, contents).run()
    return made


def unread(name: str, given: Mapping[str, Any], folder: str) -> TextFolder:
    """Return the models and the chain of a folder that is not there, for commands that need no files."""
    ports = PortNames(inputs={IDS: None, MASK: None}, outputs={VECTORS[0]: None})
    documents: dict[str, Any] = {
        TOKENIZER: {"model": {"vocab": {}}},
        CONFIG: {"max_position_embeddings": _MOST_TOKENS},
    }
    contents = FolderContents(folder=folder, documents=documents, ports={ONNX_FILES[-1]: ports})
    return expand(name, {"pooling": "mean", **given}, contents)


class _Expansion:
    """One folder while its values are collected."""

    def __init__(self, made: TextFolder, given: Mapping[str, Any], contents: FolderContents) -> None:
        self._made = made
        self._given = given
        self._contents = contents
        self._transformer = ""
        """The folder of the encoder's documents in the folder; `modules.json` may name another."""
        self._misread = False
        """True if modules.json is there and says nothing of use, which is told."""

    def run(self) -> None:
        """Collect everything; problems do not end the search for others."""
        for file, why in self._contents.unreadable.items():
            self._problem(("path",), f"{file} cannot be read: {why}")
        pooling = self._read_modules()
        model = self._choose_model()
        most = self._longest()
        self._check_tokenizer()
        if model is None:
            return
        file, ports = model
        inputs = self._inputs(file, ports, most)
        options = self._text_options("" if pooling is None else pooling[0])
        settings = None
        if self._classifies(ports):
            self._read_labels(file, ports)
            options = {"truncate": True, "pairs": True, **options}
        else:
            settings = self._pooling(file, ports, pooling)
            self._check_sizes(file, ports, settings)
        self._write(file, inputs, settings, {"max_tokens": most, **options})

    # ------------------------------------------------------------ reading

    def _problem(self, key: tuple[str | int, ...], words: str) -> None:
        problem = (key, _printable(words))
        if problem not in self._made.problems:
            self._made.problems.append(problem)

    def _fact(self, words: str, file: str) -> None:
        self._made.facts.append(Fact(_printable(words), file))

    def _document(self, name: str) -> Mapping[str, Any]:
        """Return a document of the encoder, from the folder or where modules.json says; empty if it is not there."""
        found = self._contents.documents.get(self._place(name))
        if found is None or isinstance(found, Mapping):
            return found or {}
        self._problem(("path",), f"{self._place(name)} is no JSON object (restore it)")
        return {}

    def _place(self, name: str) -> str:
        own = f"{self._transformer}/{name}" if self._transformer else name
        return own if own in self._contents.documents else name

    def _count(self, name: str, key: str) -> int | None:
        """Return a whole number of a document, at least 0; None if it has none."""
        value = self._document(name).get(key)
        if value is None:
            return None
        if type(value) is not int or value < 0:
            self._problem(
                ("path",), f"{self._place(name)}: {key} is {value!r}, which is no count (correct it)"
            )
            return None
        return value

    # ------------------------------------------------------------ models that classify

    @property
    def _task(self) -> str:
        """The task for which a model is exported."""
        return "text-classification" if self._is_classifier else "feature-extraction"

    @property
    def _is_classifier(self) -> bool:
        match self._document(CONFIG).get("architectures"):
            case [str(name), *_]:
                return name.endswith(CLASSIFIER)
            case _:
                return False

    def _classifies(self, ports: PortNames) -> bool:
        """Tell whether the model file gives a number for each label and text, and no vectors."""
        if LOGITS not in ports.outputs or POOLED in ports.outputs or self._given.get("pooling") is not None:
            return False
        if any(name in ports.outputs for name in VECTORS):
            return False
        sizes = ports.outputs[LOGITS]
        return self._is_classifier if sizes is None else len(sizes) == 2

    def _read_labels(self, file: str, ports: PortNames) -> None:
        sizes = ports.outputs[LOGITS]
        own = None if not sizes else sizes[-1]
        stated = self._document(CONFIG).get("id2label")
        if stated is None:
            if own is None:
                words = f"neither {file} nor {self._place(CONFIG)} says how many scores a text has"
                self._problem(("path",), f"{words} (add id2label to {CONFIG})")
                return
            names: list[Any] = [f"LABEL_{number}" for number in range(own)]
            self._made.notes.append(f"{self._place(CONFIG)} has no id2label, so labels are LABEL_0 and so on")
        else:
            by_number = stated if isinstance(stated, Mapping) else {}
            names = [by_number.get(str(number)) for number in range(len(by_number))]
        if not names or not all(isinstance(name, str) for name in names):
            words = f"{self._place(CONFIG)}: id2label does not have a label for each number from 0 on"
            self._problem(("path",), f"{words} (correct it)")
        elif sum(map(len, map(str, names))) > MOST_LABEL_CHARACTERS:
            words = f"{self._place(CONFIG)}: id2label has more than {MOST_LABEL_CHARACTERS} characters"
            self._problem(("path",), f"{words} (shorten its labels)")
        elif own not in (None, len(names)):
            self._problem(
                ("path",),
                f"the files are of different models: {file} gives {own} scores, and {self._place(CONFIG)} has "
                f"{len(names)} labels (copy those of one model)",
            )
        else:
            self._made.labels = tuple(map(str, names))
            what = "one score" if len(names) == 1 else f"{len(names)} scores"
            self._fact(f"each text, or pair of a query and a text, has {what}", f"{file}: {LOGITS}")

    # ------------------------------------------------------------ the steps after the encoder

    def _read_modules(self) -> tuple[str, bool] | None:
        """Return the pooling's file, empty for the one that the YAML states, and whether vectors are normalized."""
        modules = self._contents.documents.get(MODULES)
        if modules is None:
            return None
        kinds: list[tuple[str, str]] = []
        for entry in modules if isinstance(modules, list) else [None]:
            match entry:
                case {"type": str(kind), "path": str(path)}:
                    kinds.append((kind.rpartition(".")[2], path.strip("/")))
                case _:
                    self._misread = True
                    self._problem(
                        ("path",),
                        f"{MODULES} is no list of modules, each with a type and a path (restore it)",
                    )
                    return None
        pooling, normalizes = "", False
        for number, (kind, path) in enumerate(kinds):
            match kind:
                case "Transformer" if number == 0:
                    self._transformer = path
                case "Pooling" if number == 1:
                    pooling = f"{path}/{CONFIG}"
                case "Normalize" if number == len(kinds) - 1:
                    normalizes = True
                case _:
                    self._pools_itself_or(kind)
        return pooling, normalizes

    def _pools_itself_or(self, kind: str) -> None:
        """Refuse a step that we do not have, unless the model file has all steps in it."""
        if not any(POOLED in ports.outputs for ports in self._contents.ports.values()):
            words = f"{MODULES} has a step {kind}, which only a model file with the output {POOLED} has in it"
            self._problem(
                ("path",), f"{words} (export it by sentence-transformers: its model file has all steps)"
            )

    def _pooling(self, file: str, ports: PortNames, read: tuple[str, bool] | None) -> Any:
        """Return the pooling, which settings check; None for a model that pools by itself."""
        stated = self._given.get("pooling")
        if POOLED in ports.outputs and not stated:
            self._fact(f"the model pools by itself: {POOLED}", file)
            if len(ports.outputs) > 1:
                others = ", ".join(name for name in ports.outputs if name != POOLED)
                self._made.notes.append(f"{file} also has {others}, which each call copies and no one reads")
            return None
        of = vectors_among(ports.outputs)
        if of not in VECTORS and not stated:
            of = None  # the only output may be anything; a stated pooling says that it has vectors
        if of is None:
            words = f"{file} has the outputs {', '.join(ports.outputs)}, and none is {' or '.join(VECTORS)}"
            self._problem(("pooling",), f"{words} (if its only output has a vector per token: pooling: mean)")
            return None
        if stated is not None:
            self._fact(f"pooling: {stated} of {of}", "the YAML")
            return stated
        told = len(self._made.problems)
        file, normalizes = read or ("", False)
        mode = self._mode(file) if file else None
        if mode is None:
            if told == len(self._made.problems) and not self._misread:
                words = f"no file says how tokens become one vector: there is no {MODULES} with a Pooling"
                self._problem(
                    ("pooling",),
                    f"{words} (add pooling: mean, or cls, last or max, as the model was trained)",
                )
            return None
        self._fact(f"pooling: {mode} of {of}", file)
        if normalizes:
            self._fact("vectors have the length 1", MODULES)
        return f"{mode}, normalize" if normalizes else mode

    def _mode(self, file: str) -> str | None:
        """Return our mode for a pooling's config; a problem is noted where there is none."""
        config = self._contents.documents.get(file)
        if not isinstance(config, Mapping):
            self._problem(
                ("path",),
                f"{MODULES} names a pooling, and {file} is not there or no JSON object (restore it)",
            )
            return None
        word = config.get("pooling_mode")
        older = [key for key in config if key.startswith("pooling_mode_") and config[key] is True]
        chosen = (
            list(map(str, word)) if isinstance(word, list) else [word] if isinstance(word, str) else older
        )
        modes = [_WORDS.get(each, _POOLINGS.get(each)) for each in chosen]
        if len(modes) == 1 and modes[0] is not None:
            return modes[0]
        words = f"{file}: the pooling is {' and '.join(chosen) or 'none'}"
        self._problem(
            ("pooling",),
            f"{words}, and there are mean, cls, last and max, one at a time (export the model by sentence-transformers: its "
            f"model file has all steps, and the output {POOLED})",
        )
        return None

    # ------------------------------------------------------------ files

    def _choose_model(self) -> tuple[str, PortNames] | None:
        wanted = ONNX_FILES if self._given.get("engine") == "onnxruntime" else MODEL_FILES
        there = [file for file in wanted if file in self._contents.ports]
        # A file that no installed engine reads is not taken where there is another one.
        found = sorted(there, key=lambda file: not self._is_readable(file))
        if not found:
            if not any(file in self._contents.unreadable for file in wanted):
                what = "ONNX" if wanted == ONNX_FILES else "ONNX or IR"
                self._problem(
                    ("path",),
                    f"no {what} model is in {self._contents.folder}: {', '.join(wanted)} "
                    f"({_EXPORT.format(task=self._task)})",
                )
            return None
        file = found[0]
        ports = self._contents.ports[file]
        self._fact(f"inputs {', '.join(ports.inputs)}; outputs {', '.join(ports.outputs)}", file)
        if len(found) > 1:
            hint = ""
            if file in IR_FILES and any(each in ONNX_FILES for each in found):
                hint = "; engine: onnxruntime takes the ONNX file"
            elif file != there[0]:
                hint = f"; {there[0]} needs the engine openvino, which is not installed"
            self._made.notes.append(f"{', '.join(found[1:])} is not used{hint}")
        return file, ports

    def _is_readable(self, file: str) -> bool:
        is_named = self._given.get("engine") not in (None, "auto")
        return is_named or not self._contents.installed.isdisjoint(engines_of_path(PurePosixPath(file)))

    def _longest(self) -> int | None:
        """Return the number of tokens of the longest text; a problem is noted where no file says it."""
        most, source = self._positions()
        stated = self._tokenizer_given().get("max_tokens")
        if stated is not None:
            if type(stated) is int and most is not None and stated > most:
                self._problem(
                    ("tokenizer", "max_tokens"),
                    f"the model has {most} positions, {source} (write at most {most})",
                )
            self._fact(f"longest text: {stated} tokens", "the YAML")
            return stated if type(stated) is int else None
        for name, key in ((SENTENCE, "max_seq_length"), (TOKENIZER_CONFIG, "model_max_length")):
            value = self._document(name).get(key)
            # Where there is no limit, transformers writes 1e30.
            if isinstance(value, int | float) and type(value) is not bool and 0 < value < _MOST_TOKENS:
                if most is not None and value > most:
                    words = f"{self._place(name)}: {key} is {int(value)}, and the model has {most} positions, {source}"
                    self._made.notes.append(f"{words}; longer texts are refused")
                    break
                most, source = int(value), f"{self._place(name)}: {key}"
                break
        if most is None:
            self._problem(
                ("tokenizer",),
                "no file says how many tokens a text may have (add tokenizer: {max_tokens: 512}, as the model was trained)",
            )
            return None
        self._fact(f"longest text: {most} tokens", source)
        return most

    def _positions(self) -> tuple[int | None, str]:
        positions = self._count(CONFIG, "max_position_embeddings")
        source = f"{self._place(CONFIG)}: max_position_embeddings"
        if not positions:
            return None, ""
        if self._document(CONFIG).get("model_type") in _OFFSET_POSITIONS:
            pad = self._count(CONFIG, "pad_token_id")
            return positions - (1 if pad is None else pad) - 1, f"{source}, less those before the first token"
        return positions, source

    # ------------------------------------------------------------ the tokenizer

    def _tokenizer_given(self) -> Mapping[str, Any]:
        given = self._given.get("tokenizer")
        if given is None or (isinstance(given, Mapping) and not given.keys() & {"path", "outputs"}):
            return given or {}
        words = "the folder has its tokenizer, and says what it gives"
        self._problem(("tokenizer",), f"{words} (write options only: {_OPTIONS})")
        return {}

    def _check_tokenizer(self) -> None:
        if TOKENIZER not in self._contents.documents:
            if TOKENIZER not in self._contents.unreadable:
                self._problem(("path",), f"there is no {TOKENIZER} in {self._contents.folder} ({_SAVE})")
            return
        ids = _ids(self._contents.documents[TOKENIZER])
        if ids is None:
            self._problem(
                ("path",), f"{TOKENIZER} is no tokenizer: it has no model with a vocabulary ({_SAVE})"
            )
            return
        self._fact(f"{len(ids)} tokens, ids up to {max(ids.values(), default=0)}", TOKENIZER)
        size = self._count(CONFIG, "vocab_size")
        over = sorted((number, token) for token, number in ids.items() if size is not None and number >= size)
        if over:
            number, token = over[-1]
            self._problem(
                ("path",),
                f"{TOKENIZER} is of another model: its token {token!r} has the id {number}, and {self._place(CONFIG)} has "
                f"vocab_size {size} (copy the tokenizer of this model)",
            )
        self._check_pad(ids)
        self._note_settings(self._contents.documents[TOKENIZER])

    def _check_pad(self, ids: Mapping[str, int]) -> None:
        token = self._document(TOKENIZER_CONFIG).get("pad_token") or self._document(SPECIAL).get("pad_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        stated = self._document(CONFIG).get("pad_token_id")
        if isinstance(token, str) and type(stated) is int and ids.get(token, stated) != stated:
            self._made.notes.append(
                f"the padding token {token!r} has the id {ids[token]} in {TOKENIZER}, and {self._place(CONFIG)} has "
                f"pad_token_id {stated}, which is used"
            )

    def _note_settings(self, tokenizer: Any) -> None:
        for key in ("padding", "truncation"):
            if isinstance(tokenizer, Mapping) and tokenizer.get(key) is not None:
                self._made.notes.append(f"{TOKENIZER} has {key} switched on; it is switched off here")

    def _text_options(self, pooling: str) -> dict[str, Any]:
        """Return what becomes of a text before it is tokenised; `pooling` is the file of the pooling's config."""
        options: dict[str, Any] = {}
        if self._document(SENTENCE).get("do_lower_case") is True:
            options["lower_case"] = True
            self._fact("texts are lowered", f"{self._place(SENTENCE)}: do_lower_case")
        document = self._document(PROMPTS)
        name = document.get("default_prompt_name")
        if name is None or "prompt" in self._tokenizer_given():
            return options
        prompts = document.get("prompts")
        prompt = prompts.get(name) if isinstance(prompts, Mapping) else None
        if not isinstance(prompt, str):
            words = f"{PROMPTS} has the default prompt {name!r}, and no text for it"
            self._problem(
                ("path",), f"{words} (restore it, or say what stands before texts: tokenizer: {{prompt: ''}})"
            )
            return options
        config = self._contents.documents.get(pooling)
        if prompt and isinstance(config, Mapping) and config.get("include_prompt") is False:
            words = f"{pooling} leaves the tokens of the prompt out of the vector, which is not done here"
            self._problem(
                ("path",), f"{words} (serve the model without its prompt: tokenizer: {{prompt: ''}})"
            )
        if prompt:
            options["prompt"] = prompt
            self._fact(f"before every text stands {prompt!r}", f"{PROMPTS}: default_prompt_name")
        return options

    # ------------------------------------------------------------ the encoder

    def _inputs(self, file: str, ports: PortNames, most: int | None) -> dict[str, Any]:
        """Return the inputs' settings."""
        strange = [name for name in ports.inputs if name not in (IDS, MASK, TYPES)]
        for name in strange:
            self._problem(
                ("path",),
                f"{file} has an input {name!r}, and texts give {IDS}, {MASK} and {TYPES} (export the model for the task "
                f"{self._task}, which computes the others itself)",
            )
        if IDS not in ports.inputs:
            self._problem(
                ("path",),
                f"{file} has no input {IDS}; it has {', '.join(ports.inputs)} (export it by optimum)",
            )
        pad = self._count(CONFIG, "pad_token_id")
        if pad is not None:
            self._fact(f"padding: the id {pad}", f"{self._place(CONFIG)}: pad_token_id")
        batching = self._given.get("batching")
        rows = batching.get("max_batch") if isinstance(batching, Mapping) else None
        rows = max(64, rows) if type(rows) is int else 64
        inputs: dict[str, Any] = {}
        for name in ports.inputs:
            match name:
                case "input_ids":
                    inputs[name] = {
                        "shape": f"batch:1..{rows}, seq:1..{most or 512}",
                        "pad": {"seq": pad or 0},
                    }
                case "attention_mask":
                    inputs[name] = {"shape": "batch, seq", "pad": {"seq": 0}, "mask_of": IDS}
                case "token_type_ids":
                    inputs[name] = {"shape": "batch, seq", "pad": {"seq": 0}}
        if MASK not in ports.inputs:
            self._made.notes.append(
                f"{file} has no {MASK}, so nothing is padded: only texts of equal numbers of tokens share a call"
            )
            for settings in inputs.values():
                del settings["pad"]
        return inputs

    def _check_sizes(self, file: str, ports: PortNames, pooling: Any) -> None:
        """Note the size of the vector, and a problem where files contradict each other about it."""
        said: dict[str, int] = {}
        if (hidden := self._count(CONFIG, "hidden_size")) is not None:
            said[f"{self._place(CONFIG)}: hidden_size"] = hidden
        for place, document in self._contents.documents.items():
            for key in ("embedding_dimension", "word_embedding_dimension"):
                if isinstance(document, Mapping) and type(size := document.get(key)) is int:
                    said[f"{place}: {key}"] = size
        sizes = ports.outputs.get(POOLED if pooling is None else vectors_among(ports.outputs) or "") or ()
        if sizes and (own := sizes[-1]) is not None:
            said[file] = own
        if len(set(said.values())) > 1 and pooling is not None:
            listed = ", ".join(f"{size} ({source})" for source, size in said.items())
            self._problem(
                ("path",),
                f"the files are of different models: the size of a vector is {listed} (copy those of one model)",
            )
        elif said:
            source, size = list(said.items())[-1]
            self._fact(f"a vector has {size} numbers", source)

    def _write(
        self,
        file: str,
        inputs: dict[str, Any],
        pooling: Any,
        options: Mapping[str, Any],
    ) -> None:
        """Write the two models and the chain; `options` are the tokenizer's."""
        name, given, folder = self._made.name, self._given, self._contents.folder
        lists = [IDS, *([TYPES] if TYPES in inputs else [])]
        routing = {key: given[key] for key in ROUTING if key in given}
        self._made.tokens = {
            "name": f"{name}.tokens",
            **routing,
            "tokenizer": {
                "path": f"{folder}/{TOKENIZER}",
                **options,
                **self._tokenizer_given(),
                "outputs": lists,
            },
        }
        probe: dict[str, Any] = {}
        for port, key in ((IDS, "vocab_size"), (TYPES, "type_vocab_size")):
            if port in inputs and (size := self._count(CONFIG, key)):
                probe[port] = {"integers": [0, size - 1]}
                self._fact(f"the proof tries {port} from 0 to {size - 1}", f"{self._place(CONFIG)}: {key}")
        own = {key: value for key, value in given.items() if key not in ("tokenizer", "pooling")}
        encoder = {
            **own,
            "name": f"{name}.encoder",
            "path": f"{folder}/{file}",
            "inputs": _over(inputs, given.get("inputs")),
            "probe": _over(probe, given.get("probe")),
        }
        encoder.setdefault("engine", None)
        if pooling is not None:
            encoder["pooling"] = pooling
        self._made.encoder = {key: value for key, value in encoder.items() if value is not None}
        routing.pop("shadow", None)  # the two models are compared, each with its own
        self._made.chain = routing | _chain(
            name,
            lists,
            most_tokens=options["max_tokens"] or 512,
            of_pairs=bool(options.get("pairs")),
            version=given.get("version"),
        )


def _chain(
    name: str, lists: list[str], *, most_tokens: int, of_pairs: bool, version: Any = None
) -> dict[str, Any]:
    """Return the chain of both models; `lists`: the tokenizer's outputs that the encoder takes.

    `version`: of all three, where the folder states one.
    """
    of_version = "" if version is None else versioned("", str(version))
    feeds = {port: f"tokenise.{port}" for port in lists}
    encode = {
        "name": "classify" if of_pairs else "embed",
        "model": f"{name}.encoder{of_version}",
        "inputs": feeds,
        "each": [f"item of {source}" for source in feeds.values()],
        "at_most": AT_MOST_TEXTS,
        # Less than the default, since a request reserves it before it begins.
        "at_most_bytes": min(64 << 20, AT_MOST_TEXTS * most_tokens * 8 * len(lists)),
    }
    inputs = ["text", "query"] if of_pairs else ["text"]
    answer = {"score": f"classify.{LOGITS}"} if of_pairs else {"embedding": f"embed.{POOLED}"}
    tokenise = {
        "name": "tokenise",
        "model": f"{name}.tokens{of_version}",
        "inputs": {port: port for port in inputs},
    }
    return {
        "name": name,
        "inputs": {port: f"tokenise.{port}" for port in inputs},
        "stages": [tokenise, encode],
        "outputs": {**answer, "tokens": "tokenise.counts", "uncut": "tokenise.uncut"},
    }


def _printable(words: str) -> str:
    """Return the text with half characters, which JSON can write, as escapes."""
    return words.encode("utf-8", "backslashreplace").decode()


def _ids(tokenizer: Any) -> dict[str, int] | None:
    """Return the id of each token of a tokenizer.json; None if it has no vocabulary."""
    match tokenizer:
        case {"model": {"vocab": vocabulary}}:
            pass
        case _:
            return None
    ids: dict[str, int] = {}
    if isinstance(vocabulary, Mapping):
        ids |= {str(token): number for token, number in vocabulary.items() if type(number) is int}
    elif isinstance(vocabulary, list):  # Unigram: [token, score], in the order of the ids
        ids |= {
            str(entry[0]): number
            for number, entry in enumerate(vocabulary)
            if isinstance(entry, list) and entry
        }
    else:
        return None
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        match entry:
            case {"content": str(token), "id": int(number)}:
                ids[token] = number
    return ids


def _over(own: Mapping[str, Any], given: Any) -> Any:
    """Return `own` with what the YAML gives put over it, mapping by mapping; anything else is left to be refused."""
    if given is None:
        return dict(own)
    if not isinstance(given, Mapping):
        return given
    merged = dict(own)
    for key, value in given.items():
        both = isinstance(value, Mapping) and isinstance(own.get(key), Mapping)
        merged[key] = {**own[key], **value} if both else value
    return merged
