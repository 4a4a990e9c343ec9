"""Look at every row that a run would read, before a model loads."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, NamedTuple

from bapo_openrlhf.data import vision
from bapo_openrlhf.data.messages import is_text_of_messages, wrong_prompt
from bapo_openrlhf.data.prompts import Renderer
from bapo_openrlhf.data.reading import STEP, DataSet, Read, Row
from bapo_openrlhf.data.sources import SOLUTION, SourceFlags
from bapo_openrlhf.data.tokenizer import Measured, Tokenizer
from bapo_openrlhf.errors import ConfigError, not_checked, one_line
from bapo_openrlhf.flags.sizes import fits_solution, response_tokens

TYPES = {
    str: "a text", bool: "true or false", int: "a whole number", float: "a number with a point", list: "a list",
    dict: "an object",
}  # fmt: skip
OF_TEMPLATES = ("chat_template_kwargs", "tools")  # columns that other trainers give to a chat template
OF_PROMPTS = ("context", "image", "images", "instruction", "system", "system_prompt")  # that they add to the prompt

Seen = dict[bytes, tuple[str, int]]  # by prompt and images: place and label of the first such row
NOT_FOUND = "the prompt is not in the query as it is, because it is cut, has images, or the tokenizer changes it"
TAKE_RESPONSES = (
    "A reward that looks for the prompt in the query is wrong for them. Take what the model wrote from the argument "
    "responses of reward_func, or from the field that verifier.send_responses gives to a server"
)


class Findings:
    """Collects what is wrong with rows: the first row of each kind, and how many there are."""

    def __init__(self) -> None:
        self._errors: dict[str, tuple[str, int]] = {}
        self._counted: dict[str, tuple[str, str, int]] = {}
        self.warnings: list[str] = []  # of what is seldom meant

    def error(self, kind: str, text: str) -> None:
        """A row that a run cannot use. Of each kind, the first text is kept, and the others are counted."""
        first, count = self._errors.get(kind, (text, 0))
        self._errors[kind] = (first, count + 1)

    def count(self, kind: str, text: str, advice: str = "") -> None:
        """A row with what is seldom meant. Of each kind, the first text is kept, and the others are counted."""
        text, advice, count = self._counted.get(kind, (text, advice, 0))
        self._counted[kind] = (text, advice, count + 1)

    def warn_of_counted(self, rows: int) -> None:
        """Warn of each kind that was counted in so many rows."""
        for text, advice, count in self._counted.values():
            self.warnings.append(f"{text}; so it is with {count} of {rows} rows" + (f". {advice}" if advice else ""))

    def refuse_if_all(self, kind: str, rows: int) -> None:
        """Make an error of a kind that was counted in all of so many rows."""
        text, _, count = self._counted.get(kind, ("", "", 0))
        if count and count == rows:
            self.error(kind, f"{text}; so it is with all {count} rows")

    def check(self) -> None:
        """Raise ConfigError if there are errors. Its message has a line for each kind."""
        if self._errors:
            lines = [text + (f" ({count} rows are so)" if count > 1 else "") for text, count in self._errors.values()]
            raise ConfigError("\nerror: ".join(lines))


class Unmeasured(NamedTuple):
    """A prompt whose tokens are not counted yet, its place, its images, and its worked solution."""

    place: str
    prompt: str
    images: list[Any]
    solution: str | None


class Values:
    """Looks at the values of the used columns: whether each has the right form, and all labels one type.

    The columns are by the flags that name them, the prompt's first. With `chat` a prompt may be a list of messages.
    """

    def __init__(self, columns: Mapping[str, str], *, chat: bool) -> None:
        self._columns, self._chat = columns, chat
        self._first: tuple[Any, str] | None = None  # the first label and its place

    def missing(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """A kind and a text for each column that is not among these."""
        for flag, column in self._columns.items():
            if column not in names:
                yield f"no {column}", f"no column {column!r} ({flag}); it has {', '.join(names) or 'none'}"

    def wrong(self, place: str, row: Row) -> Iterator[tuple[str, str]]:
        """A kind and a text for all that is wrong with a row."""
        (_, prompt), *others = self._columns.items()
        if text := wrong_prompt(row[prompt], chat=self._chat):
            yield "prompt", f"{prompt} is {row[prompt]!r:.80}; {text}"
        for flag, column in others:
            value = row[column]
            if flag == SOLUTION:
                if value is not None and not isinstance(value, str):
                    yield "solution", f"{column} is {value!r:.80}; it must be a text, or null if there is none"
            elif value is None or (isinstance(value, float) and math.isnan(value)):  # pandas' missing number
                reason = "null or not there" if value is None else "nan"
                yield "label", f'{column} is {reason}; it must have a value, which may be the empty text ""'
            else:
                first, first_place = self._first = self._first or (value, place)
                if type(first) is not type(value):
                    text, its_text = (f"{one!r:.80}, {TYPES[type(one)]}" for one in (value, first))
                    yield "types", f"{column} is {text}, and in {first_place} it is {its_text}; give all rows one type"


class RowCheck:
    """Looks at rows one after the other. Without `render` prompts are not made here. `takes` is as in `check_data`.

    Attributes:
        problem: Prompt and label of the first row as a run gets them, or messages as JSON; None if no row is here.
        findings: What is wrong with the rows. Its warnings are of what is seldom meant.
        not_found: Of prompts that are not in the text of their tokens. Its warnings say so.
        seen: The rows, without those whose prompt and images another one had before.
    """

    def __init__(
        self, flags: SourceFlags, args: SimpleNamespace, render: Renderer | None, takes: Callable[[Any], bool] | None
    ) -> None:
        self._flags, self._args = flags, args
        self._values = Values(flags.columns, chat=args.data.apply_chat_template)
        self._render = render if render is not None and render.renders else None
        # Tokens of a prompt that OpenRLHF does not cut.
        self._max_prompt = args.data.max_len - (args.rollout.max_new_tokens or 1)
        self.findings = Findings()
        self.not_found = Findings()
        self.seen: Seen = {}
        self._pictured: dict[bool, str] = {}  # place of the first row without images, and of the first with some
        self._solution = flags.columns.get(SOLUTION)
        self._takes = takes
        self._count = self._solved = self._labelled = 0  # rows, and those with a worked solution, and with a label
        self.problem: tuple[str, Any] | None = None

    def look(self, read: Read) -> None:
        """Look at all rows. A ConfigError has a line for each kind of error, with the first row that has it."""
        warnings = self.findings.warnings
        for part in read.parts:
            missing = list(self._values.missing(part.names))
            self._warn_of_columns(part)
            if part.is_csv:
                warnings.append(f"{part.where}: a CSV file has no types, so that each value is a text")
            if part.unread:
                warnings.append(f"{part.where}: OpenRLHF reads files of one kind in a folder, and not {part.unread[0]}")
            for kind, text in missing:
                self.findings.error(kind, f"{part.where}, row 1: {text}")
            batch: list[Unmeasured] = []
            for place, row in part.places() if not missing else ():
                self._count += 1
                if self._is_good(place, row):
                    batch += self._prompt(place, row)
                if len(batch) == STEP:
                    self._measure(batch)
                    batch = []
            self._measure(batch)
        if self._flags.flag == "data.prompt_dataset" and vision.is_one_for_all(self._args):
            self._check_mixed()
        self.findings.refuse_if_all("label", self._labelled)
        self.findings.check()
        if self._flags.flag == "data.prompt_dataset" and self._count and not self._labelled:
            self._warn_of_labels(read.parts[0])
        if self._solution and self._count and not self._solved and not read.elsewhere:
            raise ConfigError(f"{SOLUTION} is {self._solution}; no row has a text in this column")
        for findings in (self.findings, self.not_found):
            findings.warn_of_counted(self._count)

    def _warn_of_columns(self, part: DataSet) -> None:
        used_columns = {*self._flags.columns.values(), self._args.data.image_key}
        templates = OF_TEMPLATES if self._args.data.apply_chat_template else ()
        for name in (*templates, *OF_PROMPTS):
            if name in part.names and name not in used_columns:
                where = "to the chat template" if name in OF_TEMPLATES else "to the model: no flag names it"
                self.findings.warnings.append(
                    f"{part.where}: the column {name} has no effect, because a run does not give it {where}"
                )

    def _warn_of_labels(self, part: DataSet) -> None:
        key = self._flags.columns.get("data.label_key")
        if not self._args.reward.remote_url:  # a reward model sees no labels
            return
        why = f"each {key} (data.label_key) is empty" if key else "data.label_key is not set"
        self.findings.warnings.append(
            f"{part.where}: {why}, so that the reward function gets the empty text as each label; the columns are "
            f"{', '.join(part.names)}"
        )

    def _is_good(self, place: str, row: Row) -> bool:
        problems = list(self._values.wrong(place, row))
        for kind, text in problems:
            self.findings.error(kind, f"{place}: {text}")
        if not problems:
            try:
                vision.check_row(place, row, self._args)
            except ConfigError as error:
                self.findings.error("images", str(error))
                return False
            except ModuleNotFoundError as error:
                self.findings.count("unseen images", not_checked(f"{place}: the images", error))
        return not problems

    def _prompt(self, place: str, row: Row) -> Iterator[Unmeasured]:
        content, solution = row[self._flags.prompt], row.get(self._solution)
        self._solved += bool(solution)
        images = row.get(self._args.data.image_key)
        others = [row[column] for flag, column in list(self._flags.columns.items())[1:] if flag != SOLUTION]
        key, label = (json.dumps(value, sort_keys=True).encode() for value in ([content, images], others))
        first, first_label = self.seen.setdefault(blake2b(key, digest_size=16).digest(), (place, hash(label)))
        if first is not place:
            self._repeats(place, first, other=hash(label) != first_label)
        if not isinstance(content, str) and content[-1].get("role") == "assistant":
            text = f"{place}: the last message is the assistant's, and a run asks for another one after it"
            self.findings.count("answered", text)
        if self._args.data.apply_chat_template and is_text_of_messages(content):
            text = f"{place}: the prompt is a text with messages in JSON or Python, and a run makes one user message"
            advice = f"If the messages are meant, give {self._flags.prompt} a list in a .jsonl or .parquet file"
            self.findings.count("as text", f"{text} of the whole text", advice)
        prompt = content if isinstance(content, str) else json.dumps(content)
        try:
            if self._render is not None:
                prompt = self._render(content)
                for kind, text, advice in self._render.doubts(content, prompt):
                    self.findings.count(kind, f"{place}: {text}", advice)
                if solution and (text := self._render.wrong_solution(content, prompt, solution)):
                    self.findings.error("solution twice", f"{place}: prompt and worked solution have {text}")
        except Exception as error:  # a chat template raises what it likes
            self.findings.error("template", f"{place}: the chat template refuses {content!r:.80}: {one_line(error)}")
            return
        answer = others[0] if others else ""
        self._labelled += answer != ""
        self.problem = self.problem or (prompt, answer)
        if self._takes and answer != "":
            self._try_label(place, answer, self._takes)
        pictures = vision.images_of(images) if images else []
        self._pictured.setdefault(bool(pictures), place)
        yield Unmeasured(place, prompt, pictures, solution)

    def _try_label(self, place: str, label: Any, takes: Callable[[Any], bool]) -> None:
        try:
            if not takes(label):
                text = f"{place}: the label is {label!r:.80}, and the reward function gives 0 to it as an answer"
                self.findings.count("label", text)
        except ModuleNotFoundError as error:
            self.findings.count("untried label", not_checked(f"{place}: the label", error))

    def _repeats(self, place: str, first: str, *, other: bool) -> None:
        same_set = place != first and place.rpartition(", ")[0] == first.rpartition(", ")[0]  # in one data set
        text = f"{place}: the prompt is that of {first.rpartition(', ')[2] if same_set else first}"
        self.findings.count("repeated", text)
        if other:
            self.findings.count("other label", f"{text}, and the label is another one")

    def _check_mixed(self) -> None:
        if len(self._pictured) == 2:
            without, with_some = self._pictured[False], self._pictured[True]
            self.findings.error(
                "mixed",
                f"{without}: the row has no image, and {with_some} has; all rows must have images, or none, because "
                "the ranks of the actor would wait for each other in the part of the model that sees. A frozen one "
                "(actor.freeze_visual_encoder) with ds.zero_stage below 3 takes both",
            )

    def _measure(self, prompts: list[Unmeasured]) -> None:
        tokenizer = None if self._render is None else self._render.tokenizer
        if tokenizer is None or not prompts:
            return
        image_token = tokenizer.image_token()
        texts_and_images = [(one.prompt, vision.counted(one.images)) for one in prompts]
        solutions = []
        for one, measured in zip(prompts, tokenizer.measured(texts_and_images, self._max_prompt), strict=True):
            self._judge_tokens(one, measured, image_token)
            if one.solution:
                solutions.append((one.place, one.solution, measured.length))
        self._measure_solutions(tokenizer, solutions)

    def _judge_tokens(self, one: Unmeasured, measured: Measured, image_token: str | None) -> None:
        place, prompt, images, _ = one
        length = measured.length
        if not measured.is_found:
            self.not_found.count("", f"{place}: {NOT_FOUND}", TAKE_RESPONSES)
        if measured.refusal:
            text = f"{place}: the model's processor refuses the images: {measured.refusal}"
            self.findings.error("processor", text)
        if measured.beyond:
            self.findings.error("unknown token of prompt", f"{place}: the prompt {measured.beyond}")
        if 2 * measured.unknown > length:
            text = f"{place}: {measured.unknown} of {length} tokens of the prompt are unknown to the model's tokenizer"
            self.findings.count("unknown", text, "The model cannot tell such prompts apart: take another model")
        if image_token and (count := prompt.count(image_token)) > len(images):
            text = f"{place}: the prompt has {count} {image_token}, the model's own token for an image, and"
            self.findings.error("image token", f"{text} {len(images)} images; a row must have an image for each")
        if not length:
            self.findings.error("no tokens", f"{place}: the prompt {prompt!r:.80} has no tokens")
        elif length > self._max_prompt and images:
            at_least = "" if vision.counted(images) else "at least "
            text = f"the prompt and its images have {at_least}{length} tokens, and it cannot be cut"
            self.findings.error("long with images", f"{place}: {text}; it must have at most {self._limit}")
        elif length > self._max_prompt:
            text = f"{place}: the prompt has {length} tokens, and a run cuts it from the left to {self._limit}"
            self.findings.count("long", text)

    def _measure_solutions(self, tokenizer: Tokenizer, solutions: list[tuple[str, str, int]]) -> None:
        """Measure worked solutions, each with its place and the tokens of its prompt."""
        if not solutions:
            return
        texts = [text for _, text, _ in solutions]
        found = zip(solutions, tokenizer.lengths_with_end(texts), tokenizer.beyond(texts), strict=True)
        for (place, _, prompt_length), length, beyond in found:
            if beyond:
                self.findings.error("unknown token of solution", f"{place}: the worked solution {beyond}")
            if not fits_solution(self._args, prompt_length, length):
                most = f"at most {response_tokens(self._args)}"
                if length <= response_tokens(self._args):
                    most = f"with its prompt of {prompt_length} at most {self._args.data.max_len}"
                text = f"{place}: the worked solution has {length} tokens with its end, and a response has {most}"
                self.findings.count("long solution", text, "Such solutions are left out")

    @property
    def _limit(self) -> str:
        response = self._args.rollout.max_new_tokens
        rest = f"rollout.max_new_tokens {response}" if response else "1 for a response"
        return f"{self._max_prompt} = data.max_len {self._args.data.max_len} - {rest}"
