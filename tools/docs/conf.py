"""Sphinx's settings for the pages that tools/docs/site.py writes."""
project = "Weft"
copyright = "the authors of Weft, Apache-2.0"
extensions = ["myst_parser"]
root_doc = "index"
myst_heading_anchors = 4  # headings have the anchors that GitHub gives them
highlight_language = "none"  # of indented code
smartquotes = False
html_theme = "furo"
html_title = "Weft"
html_static_path = ["weft.css"]
html_css_files = ["weft.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it is fetched, which browsers refuse for files
