"""Texts for users: jobs in lines, and what to do about them."""
