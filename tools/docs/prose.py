"""Sentences of comments and doc strings as Markdown."""
import re


def prose(text):
    """Text in which < begins no HTML and docs/NAME.md is a link; code between backticks stays as it is."""
    def plain(part):
        return re.sub(r"docs/([\w-]+)\.md", r"[docs/\1.md](../../\1.md)", part.replace("<", "\\<"))

    return "`".join(part if i % 2 else plain(part) for i, part in enumerate(text.split("`")))
