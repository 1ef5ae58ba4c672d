"""The page of weft simulate as a browser lays it out."""

import pytest


@pytest.mark.parametrize("flags", [["--ranks", "2,4,8", "--schedule", "all,auto", "--layout", "contiguous,zigzag,striped,balanced,auto"],
                                   ["--ranks", "512", "--docs", "65536", "--schedule", "ring", "--abreast", 1, "--layout", "zigzag"]])
def test_no_text_is_cut_or_lies_over_another(weft, show, flags):
    weft("simulate", *(["--docs", "3000,500,4692"] if "--docs" not in flags else []), *flags, "--html", "page.html")
    page = show.file(weft.folder / "page.html")
    pictures = page.evaluate("""() => [...document.querySelectorAll('svg')].map((svg) => {
      const box = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom, e.textContent]; };
      return [box(svg), [...svg.querySelectorAll('text')].map(box)];
    })""")
    assert pictures
    for frame, texts in pictures:
        for i, a in enumerate(texts):
            assert a[0] >= frame[0] and a[1] >= frame[1] - 1 and a[2] <= frame[2] and a[3] <= frame[3] + 1, (a, frame)
            for b in texts[:i]:
                assert a[0] >= b[2] - 1 or b[0] >= a[2] - 1 or a[1] >= b[3] - 4 or b[1] >= a[3] - 4, (a, b)
