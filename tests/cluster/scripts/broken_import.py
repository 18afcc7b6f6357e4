"""A script with a typo in an import."""

import numppy  # type: ignore[import-not-found]  # noqa: F401
