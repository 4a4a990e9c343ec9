r"""One notation for an answer in mathematics, and its unit apart.

People and models write one thing in many ways: 3×5 and 3\times 5, √2 and \sqrt{2}, 5 cm and 5\text{ cm}. Only the
writing is changed here. Nothing is computed.
"""

import re
from decimal import Decimal

# ------------------------------------------------------------------------------------------------------- characters

_COMMANDS = {
    "×": "times", "·": "cdot", "⋅": "cdot", "∙": "cdot", "÷": "div", "±": "pm", "π": "pi", "∞": "infty", "≤": "le",
    "⩽": "le", "≥": "ge", "⩾": "ge", "≠": "ne", "≈": "approx", "∪": "cup", "∩": "cap", "∅": "emptyset", "∈": "in",
    "∠": "angle", "△": "triangle", "⟨": "langle", "⟩": "rangle", "α": "alpha", "β": "beta", "γ": "gamma",
    "θ": "theta", "λ": "lambda", "μ": "mu", "φ": "phi", "ω": "omega",
}  # fmt: skip
_FRACTIONS = {"½": "12", "⅓": "13", "⅔": "23", "¼": "14", "¾": "34", "⅕": "15", "⅙": "16", "⅛": "18"}
_FULL_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_CHARACTERS = str.maketrans(
    {
        **{character: rf"\{name} " for character, name in _COMMANDS.items()},
        **{character: rf"\frac{{{a}}}{{{b}}}" for character, (a, b) in _FRACTIONS.items()},
        **dict.fromkeys("−–—", "-"),
        "°": r"^{\circ}",
        "ℝ": r"\mathbb{R}",
        "。": ".",
        "¢": " cents",
        "、": ", ",
    }
    | _FULL_WIDTH
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n")
_RAISED_RUN = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]+")
_ROOT = re.compile(r"√(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|[a-zA-Z]))")

_INVISIBLE = re.compile(
    r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr)(?![a-zA-Z])\.?|\\!|\\?\$|(?<!\\)\\[()]|(?<!\\)\\\[|(?<!\\)\\\](?=\s*\Z)"
    r"|\\(?:display|text|script)style(?![a-zA-Z])"
    r"|\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|bf)(?![a-zA-Z])"
    r"|\\[hv]?phantom ?\{[^{}]*\}|\\hspace\*? ?\{[^{}]*\}|\\color ?\{[^{}]*\}|\\textcolor ?\{[^{}]*\} ?(?=\{)"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # An escaped brace does not open anything.
_END = " .,;"
_SEPARATOR = re.compile(r"(?<=[0-9])(?:,\\!|\{,\}) ?(?=[0-9]{3})")  # A comma within a number in LaTeX.
BLANK = re.compile(r"(?:(?<!\\)\\[,;: ]|\\quad(?![a-zA-Z])|~|\$|\s)+")  # Two backslashes end the row of a matrix.
_NEEDLESS_BLANK = re.compile(r"(?<!,) (?![^\W_])|(?<![^\W_])(?<!,) ")  # A blank that is not between letters or digits.
_COMMA = re.compile(r",(?! )(?![0-9]{3}(?![0-9]))")
_STYLE = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|boldsymbol|operatorname)"
_AND = re.compile(
    rf",? ?{_STYLE}\{{,? ?(?:and|or) ?\}} ?|(?<=[0-9}})\]]),? (?:and|or) (?=[-+\\0-9({{\[])|(?<=[0-9}})\]]) or "
)
_STYLED = re.compile(rf"(?:{_STYLE}|\\(?:underline|bm|emph))? ?(\{{.*\}})", re.DOTALL)
_QUOTED = re.compile(r"(\*\*|`)(.+)\1")  # Markdown's
_SAYS_SO = re.compile(
    rf"\A({_STYLE} ?\{{)? ?(?:The |the )?(?:[Ff]inal |[Cc]orrect )?[Aa]nswer(?: is|:) ?(?(1)(\}})?) ?"
)
# A letter in bold or italics is a variable or a vector, and no unit.
_VARIABLE = re.compile(
    r"\\(?:textbf|textit|mathbf|mathit|mathsf|boldsymbol) ?\{ ?([a-zA-Z]) ?\}"
    r"|\\(?:mathbf|mathit|mathsf|boldsymbol) ([a-zA-Z])(?![a-zA-Z])"
)
_CONSTANT = re.compile(_STYLE + r" ?\{ ?([ei]|\\[a-zA-Z]+) ?\}|\{\\rm ?([ei])\}")
_EXPONENT = re.compile(r"(?<![\w.])([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([+-]?[0-9]+)(?!\w)")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?:\.[0-9]+)?")
_REPEATING = re.compile(r"(?<![\w.])([0-9]*)\.([0-9]*)(?:\\(?:overline|dot|bar) ?\{?([0-9]+)\}?|\(([0-9]+)\)(?![\w(]))")
_RATIO = re.compile(r"(?<=[0-9]) ?(?:\\colon(?![a-zA-Z])|\\text ?\{ ?(?:to|:) ?\}|:| to ) ?(?=[0-9])")
_ROOT_OF = re.compile(r"\\sqrt ?(\[[^\[\]]*\])? ?(?:\(([^()]*)\)|([0-9a-zA-Z]))")
_OF_SET = re.compile(r"\\(max|min|gcd|lcm) ?\\\{([^{}]*)\\\}")
_OPEN = re.compile(r"([\[\]])([^\[\]]*,[^\[\]]*)([\[\]])")  # ]0,1[ is (0,1)
_SEGMENT = re.compile(r"\\overline ?\{([A-Z]{2})\}")
_MIXED = re.compile(r"(?<![\w./^])([0-9]+) ([0-9]+)/([0-9]+)(?![\w/.])")
_DAYTIME = re.compile(r"(?<=[0-9]) ?([ap])\.? ?m\.?\Z", re.IGNORECASE)
_LEADING = re.compile(r"\A(?:=|\\approx(?![a-zA-Z])) ?")
_EMPTY = re.compile(_STYLE + r" ?\{ ?\}")
_MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MAGNITUDE = re.compile(
    rf"(?<![\w.^_])([0-9]+(?:,[0-9]{{3}})*(?:\.[0-9]+)?) ?({_STYLE}\{{)? ?({'|'.join(_MAGNITUDES)})(?![a-z]) ?"
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?\^ ?(?:\\circ|\{ ?\\circ ?\})")


def parts(text: str) -> tuple[str, str]:
    """An answer in a uniform notation, and its unit or the base of its digits. A missing part is empty."""
    text, money = _without_money(_characters(text))
    text = plain(BLANK.sub(" ", _INVISIBLE.sub("", _SEPARATOR.sub("", text))))
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text).replace("\\varnothing", "\\emptyset")
    text = re.sub(r"\\([lr])angle(?![a-zA-Z]) ?", lambda match: "(" if match[1] == "l" else ")", text)
    text = _CONSTANT.sub(lambda match: match[1] or match[2], text)
    text = plain(_VARIABLE.sub(lambda match: match[1] or match[2], text))
    text = _ROOT_OF.sub(lambda root: rf"\sqrt{root[1] or ''}{{{root[2] or root[3]}}}", _RATIO.sub(":", text))
    text = _SEGMENT.sub(r"\1", _OF_SET.sub(r"\\\1(\2)", text))
    text = _MAGNITUDE.sub(_magnitude, text)
    text = _AND.sub(", ", _COMMA.sub(", ", _NEEDLESS_BLANK.sub("", text)))
    text = _REPEATING.sub(_fraction, _EXPONENT.sub(r"\1\\times 10^{\2}", _LEADING.sub("", text)))
    if _TRIGONOMETRIC.search(text):  # sympy's functions take radians.
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text, units = _without_units(_DAYTIME.sub(r" \1m", _MIXED.sub(r"\1\\frac{\2}{\3}", text)))
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    if (ends := _OPEN.fullmatch(text)) and ends[1] + ends[3] != "[]":
        text = ("[" if ends[1] == "[" else "(") + ends[2] + ("]" if ends[3] == "]" else ")")
    return text, " ".join(dict.fromkeys(units + money))


def plain(text: str) -> str:
    r"""The text without what stands around the whole of it: blanks, styles, braces, quotes, "The answer is"."""
    before = None
    while text != before:
        before = text
        text = _SAYS_SO.sub(lambda match: "" if match[2] else match[1] or "", text.strip(" \n\t").rstrip(_END))
        styled, quoted = _STYLED.fullmatch(text), _QUOTED.fullmatch(text)
        if styled and group_ends(styled[1]).get(0) == len(styled[1]):
            text = styled[1][1:-1]
        elif quoted:
            text = quoted[2]
    return text


def group_ends(text: str) -> dict[int, int]:
    """Where each group in braces ends, by where it begins. A group that is not closed is left out."""
    ends: dict[int, int] = {}
    begun: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            begun.append(brace.start())
        elif brace[0] == "}" and begun:
            ends[begun.pop()] = brace.end()
    return ends


def is_text(text: str) -> bool:
    r"""Whether an answer is written as a text, such as \text{no}. Letters without \text may be a product."""
    return bool(re.fullmatch(r"\s*\$?\\(?:text|textbf|textit|textrm|mbox) ?\{[^{}]*\}\$?\s*", text))


def _characters(text: str) -> str:
    text = _RAISED_RUN.sub(lambda run: f"^{{{run[0].translate(_RAISED)}}}", text)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2] or root[3]}}}", text)
    return text.translate(_CHARACTERS)


def _magnitude(match: re.Match[str]) -> str:
    """5 million as 5000000. A unit may follow within the same group."""
    number = Decimal(match[1].replace(",", "")).scaleb(_MAGNITUDES[match[3]])
    return f"{number:f}" + (match[2] or " ")


def _fraction(match: re.Match[str]) -> str:
    r"""A repeating decimal as a fraction, for example 0.1\overline{6} as \frac{15}{90}."""
    whole, fixed, *repeating = match.groups()
    repeated = repeating[0] or repeating[1]
    below = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    above = int(whole + fixed + repeated) - int((whole + fixed) or "0")
    return rf"\frac{{{above}}}{{{below}}}"


# ------------------------------------------------------------------------------------------------------------ units


def _words(text: str) -> list[str]:
    return text.split()


_SYMBOLS = dict(
    pair.split("=")
    for pair in _words(
        "mm=millimeter cm=centimeter dm=decimeter m=meter km=kilometer in=inch ft=foot yd=yard mi=mile mg=milligram "
        "g=gram kg=kilogram lb=pound lbs=pound oz=ounce s=second sec=second ms=millisecond min=minute h=hour hr=hour "
        "l=liter ml=milliliter hz=hertz n=newton j=joule kj=kilojoule w=watt kw=kilowatt v=volt a=ampere k=kelvin "
        "c=celsius f=fahrenheit pa=pascal mol=mole rad=radian deg=degree mph=mile/hour feet=foot inches=inch "
        "usd=dollar people=person men=man women=woman children=child"
    )
)
# Only these and long words count as units without \text{}. The others may be products of variables, as in 2 m g.
_BARE = frozenset(_words("mm cm km sq ft kg lb lbs oz ml min hr sec mph usd feet inches men degrees am pm"))
# With one of these words, the text beside a number is no unit: it changes the number, or gives a second answer.
_NO_UNIT = frozenset(
    _words(
        "or and not no nor but than if else when unless except without plus minus times over divided to from until "
        "between about around approximately approx roughly nearly almost at least most more less fewer greater above "
        "below up down only exactly maybe possibly half halves third quarter fourth fifth sixth seventh eighth ninth "
        "tenth hundredth thousandth millionth billionth lakh crore dozen gross grand score couple squared cubed "
        "factorial choose mod modulo root power infinity pi "
        "hundred thousand million billion trillion zero one two three four five six seven eight nine ten eleven twelve "
        "twenty thirty forty fifty sixty seventy eighty ninety is are was be equals equal wrong false incorrect "
        "positive negative binary octal decimal hexadecimal hex base"
    )
)
_UNIT = re.compile(
    r"(?:(?<=[^\W_]|[})\]])(?:\\?(?P<percent>%)|\^ ?(?:\\circ|\{ ?\\circ ?\}) ?(?P<scale>[CF])?"
    rf"|{_STYLE}\{{(?P<words>(?![ei]\}})[^{{}},;=]*)\}}(?:\^\{{?(?P<power>-?[0-9])\}}?)?)"
    r"|(?<=[0-9])_\{?(?P<base>[0-9]+)\}?"
    r"|(?<=[0-9})])(?P<blank> ?)(?P<bare>[a-zA-Z][a-zA-Z./^0-9 -]*))\Z"
)
_POWER = re.compile(rf"({_STYLE}\{{[^{{}}]*\}}?)\^\{{(-?[0-9])\}}")  # Within the group or after it.
_JOINED = re.compile(rf"({_STYLE}\{{[^{{}}]*)\}}(\^-?[0-9]|) ?(/|\\cdot|) ?{_STYLE}\{{")
_WORD = re.compile(r"[a-zA-Z]+|/|\^-?[0-9]")
_MONEY = re.compile(r"^([+-]?) ?(?:\\\$|(€)|(£)) ?|(?<=[0-9]) ?(?:\\\$|(€)|(£))$")


def _without_money(text: str) -> tuple[str, list[str]]:
    r"""The text without the sign of a currency before or after it. A dollar sign without \ is LaTeX's."""
    text = re.sub(r"(?<!\\)\$", "", text).strip()
    match = _MONEY.search(text)
    if not match or not re.search("[0-9]", text):
        return text, []
    name = "euro" if "€" in match[0] else "pound" if "£" in match[0] else "dollar"
    return text[: match.start()] + (match[1] or "") + text[match.end() :], [name]


def _without_units(text: str) -> tuple[str, list[str]]:
    text = _EMPTY.sub("", _POWER.sub(r"\1^\2", text))
    while (joined := _JOINED.sub(r"\1\2 \3", text)) != text:
        text = joined
    units: list[str] = []
    while (unit := _UNIT.search(text)) and (name := _name(unit)):
        units.insert(0, name)
        text = text[: unit.start()].rstrip(" ")
    return text, units


def _name(unit: re.Match[str]) -> str | None:
    if unit["percent"]:
        return "percent"
    if unit["base"]:
        return unit["base"]
    if unit["bare"]:
        words = re.findall("[a-zA-Z]+", unit["bare"])
        symbols = all(word.casefold() in _BARE for word in words)
        speed = "/" in unit["bare"] and all(word.casefold() in _SYMBOLS for word in words)
        long = any(len(word) >= 4 for word in words) and min(map(len, words)) >= 2
        return _unit_name(unit["bare"]) if symbols or (unit["blank"] and (long or speed)) else None
    if unit["words"] is not None:
        return _unit_name(unit["words"] + (f"^{unit['power']}" if unit["power"] else ""))
    return {"C": "degree celsius", "F": "degree fahrenheit"}.get(unit["scale"], "degree")


def _unit_name(text: str) -> str | None:
    """A unit such as "meter/second^2" for m/s^2. Any noun is one, because the answer says of what a number is."""
    if text.strip() == "k":  # 5k is 5000. Kelvin is K.
        return None
    text = re.sub(r"\b([ap])\. ?m\b", r"\1m", text.casefold())
    text = re.sub(r"\\cdot|\.", " ", text).strip()
    words = _WORD.findall(text)
    if not words or "".join(words) != re.sub(r"[\s'()]|-(?![0-9])", "", text) or sum(map(str.isalpha, words)) > 5:
        return None
    names: list[str] = []
    power = ""
    for word in words:
        if word in ("square", "sq", "cubic", "cu"):
            power = "^2" if word.startswith("s") else "^3"
        elif word in ("squared", "cubed") and names:
            names.append("^2" if word == "squared" else "^3")
        elif word == "per":
            names.append("/")
        elif word.isalpha():
            if {word, _singular(word)} & _NO_UNIT or (len(word) == 1 and word not in _SYMBOLS):
                return None
            names += [_singular(word), power] if power else [_singular(word)]
            power = ""
        else:
            names.append(word)
    name = re.sub(r" ?(/) ?| (?=\^)", r"\1", " ".join(names))
    return re.sub(r" ?(\w+)\^-([0-9])", lambda one: f"/{one[1]}^{one[2]}".removesuffix("^1"), name) or None


def _singular(word: str) -> str:
    word = re.sub("metre", "meter", re.sub("litre", "liter", word))
    return _SYMBOLS.get(word) or re.sub(r"(?<=\w\w)(?<!s)s\Z", "", word)
