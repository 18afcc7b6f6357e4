"""A script with a typo in what it imports."""

import numppy  # type: ignore[import-not-found]  # noqa: F401
