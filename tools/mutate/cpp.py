"""Just enough of C++ to place mutations: tokens with offsets, matching brackets, function bodies, and text to leave alone."""
import re
from dataclasses import dataclass, field

TOKEN = re.compile(r"""
    (?P<skip>//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:\\\n|[^\n])*)
  | (?P<string>R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')
  | (?P<number>(?:0[xX][0-9a-fA-F']+|(?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[a-zA-Z]*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<op><=>|<<=|>>=|->|::|\+\+|--|&&|\|\||[-+*/%<>=!&|^]=|<<|>>|\[\[|\]\]|[^\s\w])
""", re.X | re.S | re.M)

# What these hold is not code that decides anything: texts of errors, assertions of what cannot be.
SILENT = {"throw", "static_assert", "assert", "text", "using", "template", "requires", "friend", "namespace", "enum"}
BRACKETS = {"(": ")", "[": "]", "{": "}", "[[": "]]"}


@dataclass
class Token:
    text: str
    kind: str
    begin: int
    end: int
    quiet: bool = False   # leave it alone
    partner: int = -1     # index of the matching bracket


@dataclass
class Source:
    text: str
    tokens: list = field(default_factory=list)
    bodies: list = field(default_factory=list)   # (first token of the signature, open brace, close brace) of functions

    def line_of(self, offset):
        return self.text.count("\n", 0, offset) + 1

    def function_lines(self, offset):
        """First and last line of the function around, or None."""
        for start, _, close in self.bodies:
            if self.tokens[start].begin <= offset <= self.tokens[close].end:
                return self.line_of(self.tokens[start].begin), self.line_of(self.tokens[close].end)
        return None

    def spaced(self, i):
        """Binary operators are written between spaces; signs, pointers and template brackets are not."""
        t = self.tokens[i]
        return self.text[t.begin - 1:t.begin].isspace() and self.text[t.end:t.end + 1].isspace()


def parse(text):
    source = Source(text)
    for m in TOKEN.finditer(text):
        if m.lastgroup != "skip":
            source.tokens.append(Token(m.group(), m.lastgroup, m.start(), m.end()))
    pair_brackets(source.tokens)
    hush(source.tokens)
    find_bodies(source)
    return source


def pair_brackets(tokens):
    stack = []
    for i, t in enumerate(tokens):
        if t.kind != "op":
            continue
        if t.text in BRACKETS:
            stack.append(i)
        elif stack and t.text == BRACKETS[tokens[stack[-1]].text]:
            j = stack.pop()
            t.partner, tokens[j].partner = j, i


def statement_end(tokens, i):
    """Index of the `;` that ends the statement at i, or of the brace that opens its body."""
    while i < len(tokens) and tokens[i].text not in (";", "{", "}"):
        i = tokens[i].partner + 1 if tokens[i].text in BRACKETS and tokens[i].partner > i else i + 1
    return min(i, len(tokens) - 1)


def hush(tokens):
    for i, t in enumerate(tokens):
        if t.kind != "name" or t.text not in SILENT:
            continue
        if t.text in ("text", "assert", "static_assert"):
            if i + 1 == len(tokens) or tokens[i + 1].text != "(":
                continue
            end = tokens[i + 1].partner
        elif t.text in ("template", "requires"):
            end = i + 1
            depth = 0
            while end < len(tokens) and tokens[end].text not in (";", "{"):  # up to the closing >
                depth += {"<": 1, ">": -1, ">>": -2}.get(tokens[end].text, 0)
                if depth <= 0:
                    break
                end += 1
        else:
            end = statement_end(tokens, i)
            if t.text in ("enum",) and tokens[end].text == "{":
                end = tokens[end].partner
        for j in range(i, max(i, end) + 1):
            tokens[j].quiet = True


def find_bodies(source):
    """Outermost braces that belong to no namespace, class or initializer."""
    tokens, i, start = source.tokens, 0, 0
    while i < len(tokens):
        t = tokens[i]
        if t.text == "{" and t.partner > i:
            head = {x.text for x in tokens[start:i]}
            if head & {"namespace", "class", "struct", "union", "enum"} and ")" not in head:
                start = i + 1
            elif "(" in head and not is_initializer(tokens, i):
                source.bodies.append((start, i, t.partner))
                i = start = t.partner
            else:
                i = t.partner
        elif t.text in (";", "}") or (t.text == ":" and tokens[i - 1].text in ("public", "private", "protected")):
            start = i + 1
        elif t.text in ("(", "[") and t.partner > i:
            i = t.partner
        i += 1


def is_initializer(tokens, i):
    """Whether the brace at i initializes something rather than holding statements."""
    before = tokens[i - 1]
    return before.text in ("=", ",", "(", "{", "return", "[", "?", ":") or (before.kind == "name" and before.text not in (
        "const", "noexcept", "override", "final", "else", "do", "try", "mutable"))
