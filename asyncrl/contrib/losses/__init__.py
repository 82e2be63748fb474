"""Losses and corrections of single papers and frameworks."""
