"""Prompts are texts or messages, can be made, and fit: in each kind of file, column and place."""

import json
import re
from pathlib import Path

import pytest
import transformers
from data_sets import KINDS, TEXT_KINDS
from PIL import Image

from bapo_openrlhf.data import prompts
from bapo_openrlhf.data.tokenizer import Measured, Tokenizer
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.ranges import check_template


def user(content):
    return {"role": "user", "content": content}


class TestForm:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("prompt", ["", None])
    def test_empty_or_null(self, check, kind, prompt):
        """vllm#7283."""
        rows = [{"q": f"{number}?", "a": "x"} for number in range(6)]
        rows[4]["q"] = prompt
        shown = repr("" if kind == ".csv" else prompt)
        assert check.refusal(check.write(kind, rows)).startswith(f"row 5: q is {shown}; ")

    @pytest.mark.parametrize("prompt", [" ", "\n\t", 7, 0.5, True, {"text": "1?"}])
    @pytest.mark.parametrize("chat", [False, True])
    def test_no_text(self, check, prompt, chat):
        name = check.write(".jsonl", [{"q": prompt, "a": "x"}])
        assert check.refusal(name, data__apply_chat_template=chat).startswith(f"row 1: q is {prompt!r}; ")

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != ".csv"])
    @pytest.mark.parametrize("column", ["q", "messages"])
    def test_messages_need_a_chat_template(self, check, kind, column):
        """verl#1827."""
        name = check.write(kind, [{column: [user("1?")], "a": "x"}] * 3)
        text = check.refusal(name, data__input_key=column)
        assert text.startswith(f"row 1: {column} is [{{'") and "data.apply_chat_template" in text
        assert check(name, data__input_key=column, data__apply_chat_template=True).prompts == 3

    @pytest.mark.parametrize(("messages", "needed"), [
        ([], "role"),
        (["1?"], "role"),
        ([{"from": "human", "value": "1?"}], "role"),
        ([{"role": "user"}], "role"),
        ([user("1?"), {"role": "assistant", "content": None}], "role"),
        ([user(["1?"])], "role"),
        ([user([{"type": "text"}])], "role"),
        ([{"role": "user", "content": None, "name": "me"}], "role"),
        ([user("")], "last message"),  # as of a prompt that is an empty text
        ([user([])], "last message"),
        ([user([{"type": "text", "text": "\n"}])], "last message"),
        ([user("1?"), {"role": "assistant", "content": "2?"}, user(" ")], "last message"),
    ])  # fmt: skip
    def test_messages_in_another_form_or_without_a_text(self, check, messages, needed):
        name = check.write(".jsonl", [{"q": [user("2?")], "a": "x"}, {"q": messages, "a": "x"}])
        text = check.refusal(name, data__apply_chat_template=True)
        assert text.startswith("row 2: q is ") and needed in text.rpartition("; ")[2]

    @pytest.mark.parametrize("calls", [None, [], [{"name": None}]])
    def test_messages_without_a_content_need_another_value(self, check, calls):
        """A .parquet file gives all messages the keys of each. A chat template would write None."""
        called = [{"role": "assistant", "content": None, "calls": [{"name": "f"}]}, user("2?") | {"calls": None}]
        empty = [{"role": "assistant", "content": None, "calls": calls}, user("2?") | {"calls": None}]
        good, bad = (check.write(".parquet", [{"q": [*called, *more], "a": "x"}]) for more in ([], empty))
        assert check(good, data__apply_chat_template=True).prompts == 1
        assert check.refusal(bad, data__apply_chat_template=True).startswith("row 1: q is ")

    def test_a_conversation_that_ends_with_the_answer_is_said(self, check):
        rows = [{"q": [user("1?")], "a": "x"}, {"q": [user("1?"), {"role": "assistant", "content": "1"}], "a": "x"}]
        (warning,) = check(check.write(".jsonl", rows), data__apply_chat_template=True).warnings
        assert ", row 2: " in warning and "assistant" in warning and "1 of 2 rows" in warning

    @pytest.mark.parametrize("kind", KINDS)
    def test_messages_as_json_in_a_text_are_said(self, check, kind):
        texts = ["1?", json.dumps([user("2?")]), json.dumps([user("3?"), user("4?")]), "[1]", "[", "[]", '["5?"]']
        texts += [str([user("it's")]), "[{1: "]
        name = check.write(kind, [{"q": text, "a": "x"} for text in texts])
        *_, warning = check(name, data__apply_chat_template=True).warnings
        assert warning.startswith(f"data.prompt_dataset {name}, row 2: ") and "3 of 9 rows" in warning
        assert len(check(name).warnings) == (kind == ".csv")

    @pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
    @pytest.mark.parametrize("chat", [False, True])
    def test_columns_that_other_trainers_use_are_said(self, check, kind, chat):
        of_template = {"tools": [{"name": "f"}], "chat_template_kwargs": {"enable_thinking": False}}
        more = {"instruction": "Add.", "system": "Be brief.", "id": 7, "source": "mine"} | of_template
        name = check.write(kind, [{"q": [user("1?")] if chat else "1?", "a": "x"} | more])
        warnings = check(name, data__apply_chat_template=chat).warnings
        named = {re.search(r"the column (\S+) has no effect", warning)[1] for warning in warnings}
        assert named == {"instruction", "system"} | (of_template.keys() if chat else set())


class TestImageTags:
    """sglang#32960: OpenRLHF makes an image of the text <image> before it applies a chat template."""

    CONTENTS = ("Is it <image> or <img>?", [user("Is it <image> or <img>?")], [user([{"type": "image"}])])

    @pytest.mark.parametrize("content", CONTENTS)
    @pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
    def test_without_images_it_is_refused(self, check, content, kind):
        text = check.refusal(check.write(kind, [{"q": content, "a": "x"}]), data__apply_chat_template=True)
        assert "row 1: the prompt has <image>" in text

    def test_text_stays_text(self, check):
        """Without a chat template, and in a part of a message, which is not looked into."""
        assert check(check.write(".jsonl", [{"q": "<image>?", "a": "x"}])).problem[0] == "<image>?"
        rows = [{"q": [user([{"type": "text", "text": "<image>?"}])], "a": "x"}]
        assert check(check.write(".jsonl", rows), data__apply_chat_template=True).prompts == 1


class TestRepeated:
    def test_prompts_that_are_there_twice(self, check):
        rows = [{"q": q, "a": a} for q, a in (("1?", "a"), ("2?", "b"), ("1?", "a"), ("1?", "c"), ("2?", "b"))]
        for kind in KINDS:
            name = check.write(kind, rows)
            repeated, other = check(name).warnings[-2:]
            assert f"{name}, row 3: the prompt is that of row 1; " in repeated and "3 of 5 rows" in repeated, kind
            assert f"{name}, row 4: the prompt is that of row 1, and the label " in other and "1 of 5" in other, kind

    def test_in_two_files(self, check):
        first, second = (check.write(".jsonl", [{"q": "1?", "a": "a"}, {"q": q, "a": "a"}]) for q in ("2?", "3?"))
        (warning,) = check(f"{first},{second}").warnings
        assert warning.startswith(f"data.prompt_dataset {second}, row 1: ") and first in warning
        assert "1 of 4 rows" in warning and "label" not in warning

    def test_with_other_images_it_is_another_prompt(self, check, tmp_path):
        rows = []
        for number in range(2):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
            rows.append({"q": "<image>?", "a": "x", "images": [str(tmp_path / f"{number}.png")]})
        flags = {"data__apply_chat_template": True, "data__max_images_per_prompt": 1}
        assert check(check.write(".jsonl", rows), **flags).warnings == []
        assert len(check(check.write(".jsonl", [rows[0]] * 2), **flags).warnings) == 1


def test_prompts_that_are_in_the_evaluation_too(check):
    held_out, trained = (
        check.write(".jsonl", [{"q": f"{n}?", "a": "x"} for n in range(*ends)]) for ends in ((0, 4), (2, 7))
    )
    (warning,) = check(trained, eval__dataset=held_out).warnings
    assert warning.startswith(f"eval.dataset {held_out}, row 3: ") and f"{trained}, row 1;" in warning
    assert "2 of 4 prompts" in warning
    assert check(trained, eval__dataset=check.write(".jsonl", [{"q": "7?", "a": "x"}])).warnings == []


def test_prompts_whose_tokens_are_mostly_unknown(check, tmp_path, keep_environment):
    """Half of them unknown is not said."""
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Words(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    special = {"unk_token": "?", "eos_token": "b"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(tmp_path / "words")
    (tmp_path / "words" / "config.json").write_text('{"vocab_size": 9}')
    rows = [{"q": q, "a": "x"} for q in ("a b", "a c", "d a e", "f", "a b c")]
    model = {"actor__model_name_or_path": str(tmp_path / "words")}
    found = [text for text in check(check.write(".jsonl", rows), **model).warnings if "unknown" in text]
    assert len(found) == 1 and "row 3: 2 of 3 tokens" in found[0] and "2 of 5 rows" in found[0]


def configure(folder, **fields):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.fixture
def with_tokenizer(check, tokenizer_folder, keep_environment):
    """Checks whose model has a tokenizer of one token a byte, and a chat template: <user>TEXT<ai>.

    What it puts before a text has no name, so that nobody can ask for it.
    """
    configure(tokenizer_folder, bos_token=None)
    model = {"actor__model_name_or_path": str(tokenizer_folder)}
    return lambda rows, **changed: check(check.write(".jsonl", rows), ahead=False, **model, **changed)


class TestLengths:
    """trl#3180: OpenRLHF cuts a prompt from the left, and the reward function judges a query without its prompt."""

    ROWS = tuple({"q": "é" * length, "a": "x"} for length in range(1, 9))  # 2, 4, ..., 16 tokens

    @pytest.mark.parametrize(("flags", "limit", "row", "tokens", "cut"), [
        ({"data__max_len": 20, "rollout__max_new_tokens": 10}, 10, 6, 12, 3),
        ({"data__max_len": 11, "rollout__max_new_tokens": None}, 10, 6, 12, 3),
        ({"data__max_len": 12, "rollout__max_new_tokens": 1}, 11, 6, 12, 3),
        ({"data__max_len": 16, "rollout__max_new_tokens": 10, "data__input_template": "<{}>"}, 6, 3, 8, 6),
    ])  # fmt: skip
    def test_those_that_would_be_cut_are_counted(self, with_tokenizer, flags, limit, row, tokens, cut):
        checked = with_tokenizer(self.ROWS, **flags)
        (warning,), (found,) = checked.warnings, checked.not_found
        assert f", row {row}: the prompt has {tokens} tokens, " in warning and f" {limit} = " in warning
        assert f", row {row}: " in found and all(f"with {cut} of 8 rows" in text for text in (warning, found))

    @pytest.mark.parametrize(("change", "texts"), [
        (("NFC",), ["\u00e9?", "e\u0300?", "e\u0302?"]),  # as Qwen's does
        (("Replace", "  ", " "), ["a b", "a  b", "  a"]),  # transformers#40088
    ])  # fmt: skip
    def test_those_that_the_tokenizer_changes_are_counted(self, with_tokenizer, tokenizer_folder, change, texts):
        """A reward function that looks for them in the query finds nothing."""
        from tokenizers import Tokenizer, normalizers

        rows = [{"q": text, "a": "x"} for text in texts]
        assert not with_tokenizer(rows).not_found
        made = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
        made.normalizer = getattr(normalizers, change[0])(*change[1:])
        made.save(str(tokenizer_folder / "tokenizer.json"))
        checked = with_tokenizer(rows)
        (found,) = checked.not_found
        assert ", row 2: " in found and "with 2 of 3 rows" in found and not checked.warnings

    def test_the_chat_templates_own_tokens_count(self, with_tokenizer):
        """<user> and <ai> have 6 and 4 tokens."""
        flags = {"data__apply_chat_template": True, "rollout__max_new_tokens": 10}
        assert with_tokenizer(self.ROWS, data__max_len=16 + 10 + 10, **flags).warnings == []
        (warning,) = with_tokenizer(self.ROWS, data__max_len=16 + 10 + 10 - 1, **flags).warnings
        assert ", row 8: the prompt has 26 tokens" in warning and "with 1 of 8 rows" in warning

    def test_over_all_rows(self, with_tokenizer):
        """More rows than are measured together."""
        rows = [{"q": f"{number:04}" + "x" * (number % 100 == 99), "a": "x"} for number in range(2345)]
        (warning,) = with_tokenizer(rows, data__max_len=14, rollout__max_new_tokens=10).warnings
        assert ", row 100: the prompt has 5 tokens" in warning and "with 23 of 2345 rows" in warning


class TestWhatATemplateMakes:
    ROLES = (  # as Qwen's
        "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>"
        "{{ (m.content if m.content is string else m.content[0].text).split('</think>')[-1] | trim | "
        "replace('/no_think', '') }}{% endif %}{% endfor %}<ai>"
    )

    def test_a_message_that_it_leaves_out_is_said(self, with_tokenizer, tokenizer_folder):
        (tokenizer_folder / "chat_template.jinja").write_text(self.ROLES)
        good = [{"role": "system", "content": "s"}, user("1?")]
        bad = [[*good, {"role": "human", "content": text}] for text in ("2?", [{"type": "text", "text": "3?"}])]
        rows = [{"q": content, "a": "x"} for content in (good, *bad)]
        (warning,) = with_tokenizer(rows, data__apply_chat_template=True).warnings
        assert ", row 2: " in warning and "message 3 (role 'human')" in warning and "2 of 3 rows" in warning

    @pytest.mark.parametrize(
        "text", [" 1?\n\n2? ", "1? /no_think", "a</think>2?", [{"type": "text", "text": " 1?/no_think"}]]
    )
    def test_a_message_may_be_changed_and_thinking_left_out(self, with_tokenizer, tokenizer_folder, text):
        (tokenizer_folder / "chat_template.jinja").write_text(self.ROLES)
        rows = [{"q": [user(text), {"role": "assistant", "content": "a</think>3"}, user("4?")], "a": "x"}]
        assert with_tokenizer(rows, data__apply_chat_template=True).warnings == []

    def test_a_date_is_said(self, with_tokenizer, tokenizer_folder):
        """Of this template, only where there is no system message."""
        template = "{% if messages[0].role != 'system' %}{{ strftime_now('%d %b %Y') }}{% endif %}"
        (tokenizer_folder / "chat_template.jinja").write_text(template + self.ROLES)
        rows = [{"q": [{"role": "system", "content": "s"}, user("1?")], "a": "x"}, {"q": "2?", "a": "x"}]
        assert with_tokenizer(rows[:1], data__apply_chat_template=True).warnings == []
        (warning,) = with_tokenizer(rows, data__apply_chat_template=True).warnings
        assert ", row 2: " in warning and "strftime_now" in warning and "1 of 2 rows" in warning
        assert with_tokenizer([{"q": "1?", "a": "x"}]).warnings == []


class TestStart:
    """The token that a tokenizer puts before a text, as Llama's and Gemma's do. OpenRLHF asks it not to."""

    @pytest.mark.parametrize(("template", "advice"), [(None, "<s>{}"), ("Q: {}", "<s>Q: {}")])
    def test_is_said_where_it_is_missing(self, with_tokenizer, tokenizer_folder, template, advice):
        configure(tokenizer_folder, bos_token="<s>")
        rows = [{"q": f"{number}?", "a": "x"} for number in range(2)]
        (warning,) = with_tokenizer(rows, data__input_template=template).warnings
        assert ", row 1: the prompt does not begin with <s>" in warning and "2 of 2 rows" in warning
        assert warning.endswith(f"Set data.input_template to {advice!r}")
        check_template("data.input_template", advice)
        assert with_tokenizer(rows, data__input_template=advice).warnings == []
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
        filled = tokenizer(advice.format("1?"), add_special_tokens=False).input_ids
        assert filled == tokenizer((template or "{}").format("1?")).input_ids

    @pytest.mark.parametrize(("start", "chat"), [("<s>", True), ("</s>", False)])
    def test_is_not_missed_with_a_chat_template_or_where_the_tokenizer_adds_none(
        self, with_tokenizer, tokenizer_folder, start, chat
    ):
        configure(tokenizer_folder, bos_token=start)
        assert with_tokenizer([{"q": "1?", "a": "x"}], data__apply_chat_template=chat).warnings == []


SOLVED = {"data__solution_key": "s"}


class TestSolutions:
    def test_is_a_text_or_null(self, check):
        rows = [{"q": "1?", "a": "x", "s": None}, {"q": "2?", "a": "x", "s": "x is 1"}]
        for kind in KINDS:  # in a CSV file, null is an empty cell
            found = check(check.write(kind, rows), **SOLVED)
            assert (found.prompts, found.problem, len(found.warnings)) == (2, ("1?", "x"), kind == ".csv"), kind
        text = check.refusal(check.write(".jsonl", [{"q": "1?", "a": "x", "s": 7}]), **SOLVED)
        assert text.startswith("row 1: s is 7; ")
        text = check.refusal(check.write(".jsonl", [{"q": "1?", "a": "x"}]), **SOLVED)
        assert text.startswith("row 1: no column 's' (data.solution_key); it has q, a")

    @pytest.mark.parametrize("kind", TEXT_KINDS)
    def test_may_be_left_out_of_a_row(self, check, kind):
        rows = [{"q": "1?", "a": "x"}, {"q": "2?", "a": "x", "s": "x is 1"}, {"q": "3?", "a": "x"}]
        assert check(check.write(kind, rows), **SOLVED).prompts == 3
        text = check.refusal(check.write(kind, [*rows, {"q": "4?", "s": "x is 2"}]), **SOLVED)
        assert "row 4: a is null or not there" in text

    def test_is_no_label(self, check):
        rows = [{"q": "1?", "a": "x", "s": worked} for worked in ("one", "two")]
        name = check.write(".jsonl", rows)
        assert check(name, **SOLVED, data__label_key=None).problem == ("1?", "")
        (warning,) = check(name, **SOLVED).warnings
        assert "row 2: the prompt is that of row 1" in warning and "1 of 2 rows" in warning

    def test_a_column_without_any_is_refused(self, check):
        rows = [{"q": "1?", "a": "x", "s": ""}, {"q": "2?", "a": "x", "s": None}]
        assert check.refusal(check.write(".jsonl", rows), **SOLVED).startswith("data.solution_key is s; ")

    def test_those_that_no_response_could_hold_are_counted(self, with_tokenizer):
        """A token a byte, and one for the end, which is not added twice.

        Of 6, 7 and 8 tokens, a response of 7 holds the first two. Without a limit for responses, a prompt and its
        response have 8 tokens.
        """
        rows = [{"q": f"{n}?", "a": "x", "s": "x" * n} for n in (5, 6, 7)] + [{"q": "?", "a": "x", "s": None}]
        (warning,) = with_tokenizer(rows, **SOLVED, rollout__max_new_tokens=7).warnings
        assert ", row 3: the worked solution has 8 tokens" in warning and "1 of 4 rows" in warning
        rows = [{"q": q, "a": "x", "s": s} for q, s in (("1?", "xxxxx"), ("2?", "xxxxx</s>"), ("33?", "xxxxx"))]
        (warning,) = with_tokenizer(rows, **SOLVED, rollout__max_new_tokens=None, data__max_len=8).warnings
        assert ", row 3: the worked solution has 6 tokens" in warning and "its prompt of 3 at most 8; " in warning


class TestTokenizer:
    def test_what_the_chat_template_refuses(self, with_tokenizer, tokenizer_folder):
        template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        (tokenizer_folder / "chat_template.jinja").write_text(template + "{{ m.content }}{% endfor %}")
        rows = [{"q": [user("1?")], "a": "x"}, {"q": [{"role": "system", "content": "s"}, user("1?")], "a": "x"}]
        with pytest.raises(ConfigError, match=r", row 2: .*TemplateError: no system$"):
            with_tokenizer(rows, data__apply_chat_template=True)

    def test_without_a_chat_template(self, with_tokenizer, tokenizer_folder):
        (tokenizer_folder / "chat_template.jinja").unlink()
        rows = [{"q": "1?", "a": "x"}]
        assert with_tokenizer(rows).prompts == 1
        with pytest.raises(ConfigError, match=r"^data.apply_chat_template is set"):
            with_tokenizer(rows, data__apply_chat_template=True)

    def test_a_folder_without_one_is_refused(self, tmp_path):
        for other in ("config.json", "model.safetensors", "preprocessor_config.json", "generation_config.json"):
            (tmp_path / other).touch()
        with pytest.raises(ConfigError, match=f"^model is {tmp_path}; "):
            prompts.check_tokenizer("model", str(tmp_path))
        (tmp_path / "spiece.model").touch()
        prompts.check_tokenizer("model", str(tmp_path))
        prompts.check_tokenizer("model", "no-such-owner/no-such-model")

    def test_each_that_transformers_knows_is_one(self):
        sources = (Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py")
        blocks = re.findall(r"VOCAB_FILES_NAMES = \{(.*?)\}", "".join(map(Path.read_text, sources)), re.DOTALL)
        tokenizers = [files for block in blocks if (files := re.findall(r': "(.*?)"', block))]
        assert len(tokenizers) > 50
        assert [one for one in tokenizers if not any(map(prompts.TOKENIZER_NAME.fullmatch, one))] == []

    def test_prompts_without_tokens(self, with_tokenizer, monkeypatch):
        def measured(self, texts, most):
            return [Measured(len(text) - 1, True, "", 0, None) for text, _ in texts]

        monkeypatch.setattr(Tokenizer, "measured", measured)
        with pytest.raises(ConfigError, match=r", row 2: the prompt 'x' has no tokens$"):
            with_tokenizer([{"q": "xx", "a": "x"}, {"q": "x", "a": "x"}])

    def test_the_models_own_token_for_an_image_needs_one(self, with_tokenizer, tmp_path, monkeypatch):
        """Such a tokenizer is a processor, whose chat template makes <img> of an image."""
        made = {"0?": "0?", "2?": "<img><img>", "<image>?": "<img>?", "<image><img>?": "<img><img>?"}
        monkeypatch.setattr(Tokenizer, "image_token", lambda self: "<img>")
        monkeypatch.setattr(prompts.Renderer, "__call__", lambda self, content: made.get(str(content)))
        Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
        flags = {"data__apply_chat_template": True, "data__max_images_per_prompt": 1}
        with_image = [{"q": "<image>?", "a": "x", "images": [str(tmp_path / "a.png")]}]
        good = [{"q": "0?", "a": "x", "images": []}, *with_image]
        assert with_tokenizer(good, **flags).prompts == 2
        with pytest.raises(ConfigError, match=r", row 3: the prompt has 2 <img>, .*, and 0 images; "):
            with_tokenizer([*good, {"q": "2?", "a": "x", "images": None}], **flags)
        with pytest.raises(ConfigError, match=r", row 1: the prompt has 2 <img>, .*, and 1 images; "):
            with_tokenizer([with_image[0] | {"q": "<image><img>?"}], **flags)

    def test_a_prompt_with_images_is_not_cut(self, with_tokenizer, tmp_path):
        """A run would cut tokens of its images. Without images it is only a warning."""
        Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
        flags = {"data__max_images_per_prompt": 1, "data__max_len": 20, "rollout__max_new_tokens": 10}
        row = {"q": "x" * 11, "a": "x", "images": [str(tmp_path / "a.png")]}
        with pytest.raises(ConfigError, match=", row 1: the prompt and its images have 11 tokens"):
            with_tokenizer([row], **flags)
        (warning,) = with_tokenizer([row | {"images": None}], **flags).warnings
        assert "the prompt has 11 tokens" in warning
        assert with_tokenizer([row | {"q": "x" * 10}], **flags).warnings == []

    @pytest.mark.parametrize("turned", [False, True])
    def test_tokens_of_images_are_counted_with_the_models_processor(
        self, with_tokenizer, tokenizer_folder, tmp_path, monkeypatch, turned
    ):
        """R1-V#161: as a run does it, also for a photo that the camera has noted as turned."""

        class Processor:
            """It gives an image as many tokens as it is wide, and takes none that is 13 wide."""

            image_processor, image_token, chat_template = object(), "#", "a template"
            tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)

            def apply_chat_template(self, messages, **options):
                return "".join("#" if part["type"] == "image" else part["text"] for part in messages[0]["content"])

            def __call__(self, text, images, add_special_tokens):
                assert not add_special_tokens
                widths = [image.width for image in images]
                if 13 in widths:
                    raise ValueError("13 brings bad luck")
                whole = re.sub("#", lambda _: "#" * widths.pop(0), text[0])
                return {"input_ids": [self.tokenizer(whole, add_special_tokens=False)["input_ids"]]}

        configure(tokenizer_folder, bos_token=None)
        config = tokenizer_folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vision_config": {}}))
        monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *_, **__: Processor())

        def row(*widths):
            paths = [str(tmp_path / f"{width}.jpg") for width in widths]
            for path, width in zip(paths, widths, strict=True):
                noted = Image.Exif()
                noted[0x0112] = 6 if turned else 1  # the camera was turned by a quarter
                Image.new("RGB", (8, width) if turned else (width, 8)).save(path, exif=noted)
            return {"q": "<image>" * len(widths) + "x?", "a": "x", "images": paths}

        flags = {"data__max_images_per_prompt": 2, "data__apply_chat_template": True, "rollout__max_new_tokens": 10}
        rows = [row(1), row(30), row(30) | {"q": "<image>y?"}, row(20, 16)]
        checked = with_tokenizer(rows, data__max_len=38 + 10, **flags)
        assert not checked.warnings and "row 2: " in checked.not_found[0] and "3 of 4" in checked.not_found[0]
        with pytest.raises(ConfigError, match=", row 4: the prompt and its images have 38 tokens"):
            with_tokenizer(rows, data__max_len=37 + 10, **flags)
        with pytest.raises(ConfigError, match=r", row 2: the model's processor refuses .*: ValueError: 13 brings"):
            with_tokenizer([row(1), row(13)], data__max_len=40, **flags)

    @pytest.mark.parametrize("key", ["q", "s"])
    def test_a_token_that_the_model_has_no_embedding_of(self, with_tokenizer, tokenizer_folder, key):
        """The bytes of é have the ids 129 and 104, and all bytes of the other rows are below 129."""
        config = tokenizer_folder / "config.json"
        rows = [{"q": f"{number}?", "a": "x", "s": "x"} for number in range(3)]
        rows[2][key] += "é"
        null = {"vocab_size": 130, "text_config": None}
        for sizes in ({"vocab_size": 130}, {"vocab_size": 129, "image_token_id": 129}, null):
            config.write_text(json.dumps(sizes))
            assert with_tokenizer(rows, **SOLVED).prompts == 3
        config.write_text(json.dumps({"text_config": {"vocab_size": 129}, "vocab_size": 130}))
        what = "prompt" if key == "q" else "worked solution"
        with pytest.raises(ConfigError, match=f", row 3: the {what} has the token 'Ã' with the id 129; "):
            with_tokenizer(rows, **SOLVED)

    def test_worked_solutions_need_an_end_token(self, with_tokenizer, tokenizer_folder):
        configure(tokenizer_folder, eos_token=None)
        name_end(tokenizer_folder / "generation_config.json", 1)
        rows = [{"q": "1?", "a": "x", "s": "x"}]
        assert with_tokenizer(rows).prompts == 1
        with pytest.raises(ConfigError, match=r"^data.solution_key is s, and actor.model_name_or_path is .*eos_token"):
            with_tokenizer(rows, **SOLVED)

    @pytest.mark.parametrize("of_config", [None, 1])
    @pytest.mark.parametrize("of_generation", [None, [1], ...])
    def test_there_is_an_end_token(self, with_tokenizer, tokenizer_folder, of_config, of_generation):
        """vLLM takes those of tokenizer and generation_config.json. It takes that of config.json if these have none."""
        rows = [{"q": "1?", "a": "x"}]
        name_end(tokenizer_folder / "config.json", of_config)
        if of_generation is not ...:
            name_end(tokenizer_folder / "generation_config.json", of_generation)
        assert with_tokenizer(rows).prompts == 1  # the tokenizer has one
        configure(tokenizer_folder, eos_token=None)
        if of_config if of_generation is ... else of_generation:
            assert with_tokenizer(rows).prompts == 1
        else:
            with pytest.raises(ConfigError, match="; it has no end token"):
                with_tokenizer(rows)

    @pytest.mark.parametrize("kind", ["eos_token", "pad_token"])
    def test_a_special_token_that_the_model_has_no_embedding_of(self, with_tokenizer, tokenizer_folder, kind):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
        tokenizer.add_special_tokens({kind: "<new>"})
        tokenizer.save_pretrained(tokenizer_folder)
        (tokenizer_folder / "config.json").write_text('{"vocab_size": 259}')
        assert with_tokenizer([{"q": "1?", "a": "x"}]).prompts == 1
        (tokenizer_folder / "config.json").write_text('{"vocab_size": 258}')
        with pytest.raises(ConfigError, match=f"{kind} .*'<new>' with the id 258; "):
            with_tokenizer([{"q": "1?", "a": "x"}])

    def test_it_is_not_loaded_if_it_is_not_here(self, check):
        assert prompts.local_tokenizer("no-such-owner/no-such-model") is None
        name = check.write(".jsonl", [{"q": "1?", "a": "x"}])
        result = check(name, actor__model_name_or_path="no-such-owner/no-such-model", data__apply_chat_template=True)
        assert result.prompts == 1


def name_end(path, token) -> None:
    """Let a JSON file of a model name an end token."""
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | {"eos_token_id": token}))


TEMPLATES = {  # each with the prompt of "1+1", or None if it is refused
    "{}": "1+1",
    'Reply as {{"a": 1}}. Q: {}': 'Reply as {"a": 1}. Q: 1+1',
    "Put it in \\boxed{{}}: {}": "Put it in \\boxed{}: 1+1",
    "user\n{}\n": "user\n1+1\n",
    "user\\n{}": "user\\n1+1",
    "{} and again {}": None,
    "Q: {0}": None,
    "\\boxed{{}}": None,
    "{} as {": None,
    '{} as {"a": 1}': None,
    "{} {.x}": None,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_one_template_makes_one_prompt(template, tokenizer_folder, keep_environment):
    """PR#203 of OpenRLHF: of training, of `evaluate`, and of OpenRLHF's own package."""
    from bapo_openrlhf.workbench.evaluation.generate import Prompter
    from bapo_openrlhf.workbench.evaluation.problems import BenchmarkProblem

    expected = TEMPLATES[template]
    if expected is None:
        with pytest.raises(ConfigError, match=r"^data.input_template is "):
            check_template("data.input_template", template)
        return
    check_template("data.input_template", template)
    render = prompts.Renderer("model", str(tokenizer_folder), template=template, chat=False)
    asked = Prompter(str(tokenizer_folder), chat=template, images=False)(BenchmarkProblem("1", "1+1", "2"))
    assert render("1+1") == asked.text == expected
    assert render.tokenizer.lengths([expected]) == [len(asked.token_ids)] == [len(expected)]
