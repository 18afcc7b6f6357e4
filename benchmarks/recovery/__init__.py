"""How long training stands still when something dies."""
