"""Advantages: from rewards to one number per response token."""
