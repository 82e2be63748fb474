"""A module that cannot be imported, named as a reward."""

raise ValueError("two\nlines")
