"""Weft under the names of other libraries, for programs that were written for them."""
