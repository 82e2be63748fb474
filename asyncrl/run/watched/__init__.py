"""A run as somebody sees it who looks on while it goes, and changes nothing."""
