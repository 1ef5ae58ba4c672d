"""The mutation operators. Each is a generator over a parsed source that yields (begin, end, replacement) edits."""
import re

import cpp

RELATIONAL = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "%": "/", "+=": "-=", "-=": "+=", "*=": "/="}
ASSIGN = {"=", "+=", "-=", "*=", "/=", "%=", "|=", "&=", "<<=", ">>=", "^="}
EXTREME = {"min": "max", "max": "min", "min_of": "max_of", "max_of": "min_of", "fmin": "fmax", "fmax": "fmin",
           "min_element": "max_element", "max_element": "min_element"}
WAITS = re.compile(r"wait|sync|barrier|notify|(^|_)(join|lock|wake|settle)(_|$)")
DIVISIONS = {"floor_div", "ceil_div", "floor_mod"}
REALS = {"float", "double", "auto", "T", "V", "Real"}
WORDS = {"return", "if", "for", "while", "else", "do", "switch", "case", "break", "continue", "const", "auto", "using",
         "throw", "delete", "new", "goto", "try", "catch", "static", "constexpr", "typename", "public", "private",
         "protected", "default", "struct", "class", "co_return", "alignas", "inline", "extern", "operator"}


def loud(source, kinds=None):
    for i, t in enumerate(source.tokens):
        if not t.quiet and (kinds is None or t.kind in kinds):
            yield i, t


def integer(text):
    m = re.fullmatch(r"(\d[\d']*)([uUlLzZ]*)", text)
    return (int(m[1].replace("'", "")), m[2]) if m and not re.match(r"0\d", text) else None


def off_by_one(source):
    tokens = source.tokens
    for i, t in loud(source):
        value = integer(t.text) if t.kind == "number" else None
        if value:
            yield t.begin, t.end, f"{value[0] + 1}{value[1]}"
            if value[0] > 0:
                yield t.begin, t.end, f"{value[0] - 1}{value[1]}"
        # A bound: x.end, x.size() where an expression ends.
        after = i + 1
        if t.text == "size" and tokens[after].text == "(" and tokens[after].partner == after + 1:
            after += 2
        elif t.text not in ("end", "begin", "count", "rows") or tokens[i - 1].text not in (".", "->"):
            continue
        if tokens[after].text in (")", ",", ";", "]", "<", "<=", ">", ">=", "==", "!=", "?", "&&", "||"):
            yield tokens[after - 1].end, tokens[after - 1].end, " + 1"
            yield tokens[after - 1].end, tokens[after - 1].end, " - 1"


def constant(source):
    for _, t in loud(source, {"name", "number"}):
        if t.text in ("true", "false"):
            yield t.begin, t.end, "false" if t.text == "true" else "true"
        if t.kind == "number":
            value = integer(t.text)
            if value and value[0] > 1:
                yield t.begin, t.end, f"{2 * value[0]}{value[1]}"
                yield t.begin, t.end, f"0{value[1]}"
            elif not value and re.match(r"[\d.]+([eE].*)?f?$", t.text):
                yield t.begin, t.end, f"(2 * {t.text})"
                yield t.begin, t.end, f"(0 * {t.text})"


def operand_before(tokens, i):
    """First token of the operand that ends before i."""
    i -= 1
    while i >= 0:
        if tokens[i].text in (")", "]") and tokens[i].partner >= 0:
            i = tokens[i].partner
            if (tokens[i - 1].kind == "name" and tokens[i - 1].text not in WORDS) or tokens[i - 1].text in (")", "]"):
                i -= 1
                continue
            return i
        if tokens[i].kind not in ("name", "number"):
            return None
        if tokens[i - 1].text not in (".", "->", "::"):
            return i
        i -= 2
    return None


def operand_after(tokens, i):
    """Last token of the operand that begins after i."""
    i += 1
    if tokens[i].text in ("-", "!", "*", "+"):
        i += 1
    if tokens[i].text == "(":
        i = tokens[i].partner
    elif tokens[i].kind not in ("name", "number"):
        return None
    while i + 1 < len(tokens):
        after = tokens[i + 1].text
        if after in (".", "->", "::"):
            i += 2
        elif after in ("(", "[") and tokens[i + 1].partner > 0:
            i = tokens[i + 1].partner
        else:
            return i
    return None


def arguments(tokens, open_):
    """(first, last) token of each argument of a call."""
    found, first, i = [], open_ + 1, open_ + 1
    while i <= tokens[open_].partner:
        if tokens[i].text == "," or i == tokens[open_].partner:
            found.append((first, i - 1))
            first = i + 1
        i = tokens[i].partner + 1 if tokens[i].text in cpp.BRACKETS and tokens[i].partner > i else i + 1
    return found


def swapped(source):
    tokens, text = source.tokens, source.text
    for i, t in loud(source):
        if t.text in ("-", "/", "%", "<<", ">>") and source.spaced(i):
            first, last = operand_before(tokens, i), operand_after(tokens, i)
            if first is None or last is None:
                continue
            pieces = (tokens[first].begin, tokens[i - 1].end, tokens[i + 1].begin, tokens[last].end)
        elif t.text in DIVISIONS and tokens[i + 1].text == "(":
            given = arguments(tokens, i + 1)
            if len(given) != 2 or tokens[i - 1].text == "Index":
                continue
            (a, b), (c, d) = given
            pieces = (tokens[a].begin, tokens[b].end, tokens[c].begin, tokens[d].end)
        else:
            continue
        a, b, c, d = pieces
        if text[a:b] != text[c:d]:
            yield a, d, text[c:d] + text[b:c] + text[a:b]


def relational(source):
    for i, t in loud(source, {"op"}):
        if t.text in RELATIONAL and source.spaced(i):
            yield t.begin, t.end, RELATIONAL[t.text]
            if t.text in ("<", ">"):  # also the other way round
                yield t.begin, t.end, ">" if t.text == "<" else "<"


def arithmetic(source):
    for i, t in loud(source, {"op"}):
        if t.text in ARITHMETIC and source.spaced(i):
            yield t.begin, t.end, ARITHMETIC[t.text]


def condition_of(tokens, i):
    """The brackets of `if (...)` or `while (...)` at i, if they hold a plain condition."""
    open_ = i + 1
    if tokens[open_].text == "constexpr":
        open_ += 1
    if tokens[open_].text != "(" or tokens[open_].partner < 0:
        return None
    inside = tokens[open_ + 1:tokens[open_].partner]
    return None if any(t.text in ("=", ";") for t in inside) else (open_, tokens[open_].partner)


def logical(source):
    tokens = source.tokens
    for i, t in loud(source):
        if t.text in ("&&", "||") and source.spaced(i):
            yield t.begin, t.end, "||" if t.text == "&&" else "&&"
        elif t.text in ("if", "while"):
            brackets = condition_of(tokens, i)
            if brackets and tokens[brackets[0] + 1].text != "!":  # without it, below
                inside = source.text[tokens[brackets[0]].end:tokens[brackets[1]].begin]
                yield tokens[brackets[0]].end, tokens[brackets[1]].begin, f"!({inside})"
        elif t.text == "!":
            yield t.begin, t.end, ""


def statements(source):
    """(first, last) token of statements that call or assign; `last` is the `;`."""
    tokens = source.tokens
    for _, open_, close in source.bodies:
        for i in range(open_ + 1, close):
            t, before = tokens[i], tokens[i - 1]
            if t.quiet or (t.kind == "name" and t.text in WORDS):
                continue
            after_control = before.text == ")" and tokens[before.partner - 1].text in ("if", "for", "while", "constexpr")
            if before.text not in (";", "{", "}", "else") and not after_control:
                continue
            end = i
            while end < close and tokens[end].text not in (";", ")", "}", "]"):
                end = tokens[end].partner + 1 if tokens[end].text in cpp.BRACKETS and tokens[end].partner > end else end + 1
            if tokens[end].text == ";" and acts(tokens, i, end):
                yield i, end


def acts(tokens, first, end):
    """Whether tokens first..end are a call or an assignment rather than a declaration."""
    i = first
    if tokens[i].text in ("++", "--"):
        return True
    if tokens[i].kind != "name" and tokens[i].text not in ("*", "("):
        return False
    while tokens[i].text in ("*", "("):
        i = tokens[i].partner if tokens[i].text == "(" else i + 1
    last = operand_after(tokens, i - 1) if tokens[i].text != ")" else i
    while last is not None and last + 1 < end and tokens[last + 1].text in (".", "->"):
        last = operand_after(tokens, last + 1)
    if last is None or last >= end:
        return False
    after = tokens[last + 1].text
    return after in ASSIGN or after in ("++", "--") or (last + 1 == end and tokens[last].text == ")")


def is_wait(source, first, end):
    tokens = source.tokens
    if tokens[end - 1].text != ")":
        return False
    return bool(WAITS.search(tokens[tokens[end - 1].partner - 1].text))


def dropped(source):
    for first, end in statements(source):
        if not is_wait(source, first, end):
            yield source.tokens[first].begin, source.tokens[end].begin, ""


def missing_wait(source):
    """A statement that waits or wakes is dropped; of `start(...).wait();` the wait alone."""
    tokens = source.tokens
    for first, end in statements(source):
        if not is_wait(source, first, end):
            continue
        name = tokens[end - 1].partner - 1
        chained = tokens[name - 1].text == "." and tokens[name - 2].text == ")" and name - 2 > first
        yield tokens[name - 1 if chained else first].begin, tokens[end].begin, ""


def extreme(source):
    for i, t in loud(source, {"name"}):
        if t.text in EXTREME and source.tokens[i + 1].text in ("(", "<"):
            yield t.begin, t.end, EXTREME[t.text]


def rounded(source):
    """An f32 goes through bf16 (an f64 through f32) where it is assigned; rounded.h refuses what is neither."""
    tokens, text = source.tokens, source.text
    if not any(t.text in ("float", "double", "V") for t in tokens):
        return
    for i, t in loud(source, {"op"}):
        if t.text not in ("=", "+=") or tokens[i + 1].text in ("{", "[", "default", "delete"):
            continue
        declared = tokens[i - 2]  # `type name = ...`; without a type it is assigned
        if tokens[i - 1].kind == "name" and (declared.text in (">", "*", "&", "]") or (
                declared.kind == "name" and declared.text not in REALS)):
            continue
        end = i + 1
        while end < len(tokens) and tokens[end].text not in (";", ",", ")", "}"):
            end = tokens[end].partner + 1 if tokens[end].text in cpp.BRACKETS and tokens[end].partner > end else end + 1
        if end == len(tokens) or tokens[end].text != ";" or not source.function_lines(t.begin):
            continue
        right = text[tokens[i + 1].begin:tokens[end].begin]
        yield tokens[i + 1].begin, tokens[end].begin, f"weft_mutant_rounded({right})"


def early_return(source):
    tokens = source.tokens
    for start, open_, close in source.bodies:
        head = [t.text for t in tokens[start:open_]]
        if close == open_ + 1 or (tokens[start].quiet and "template" not in head):
            continue
        if "void" in head[:head.index("(")]:
            yield tokens[open_].end, tokens[open_].end, " return;"
        elif tokens[close - 1].text in (";", "}"):
            yield tokens[open_].end, tokens[open_].end, " return {};"


OPERATORS = {
    "off by one": off_by_one, "constant": constant, "swapped operands": swapped, "relational": relational,
    "arithmetic": arithmetic, "logical": logical, "dropped statement": dropped, "missing wait": missing_wait,
    "min/max": extreme, "rounded": rounded, "early return": early_return,
}


def edits(source):
    """All (operator, begin, end, replacement) of a source, in a fixed order."""
    for name, operator in OPERATORS.items():
        for begin, end, text in sorted(set(operator(source))):
            yield name, begin, end, text
